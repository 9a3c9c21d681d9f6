"""Train, run and score global AI weather models of the WXFormer kind."""

__version__ = "0.18.0"
