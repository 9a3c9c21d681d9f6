"""WXFormer and the import of its published weights."""

from credit.models.wxformer.convert_published import import_reference_state
from credit.models.wxformer.model import WXFormer

__all__ = ["WXFormer", "import_reference_state"]
