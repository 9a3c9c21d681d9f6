"""Cross-scale embedding: convolutions with different kernel sizes and the same stride; their channels are concatenated.

Source: CrossFormer, Wang et al. 2021, arXiv 2108.00154. Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.autocast import autocast_dtype
from credit.models.kernels.dispatch import LARGE_KERNEL_CONV, uses_kernel
from credit.models.kernels.large_kernel_conv import compute_halo, large_kernel_convs, strided_conv
from credit.models.kernels.patch_gather import PatchGrid
from credit.models.layers.padding import NO_PADDING, SpherePadding


class CrossScaleEmbedding(nn.Module):
    """Embedding that reduces height and width by `stride` and returns tokens of `dim` channels.

    Args:
        in_channels: channels of the input.
        dim: channels of the output. The j-th smallest kernel (j from 1) computes dim / 2^j channels, rounded down; the
            largest kernel computes the remaining channels.
        kernel_sizes: kernel edges in cells, each at least `stride`.
        stride: stride of all kernels, in cells.
        padding: padding of the input field on the sphere.

    Attributes:
        input_has_halo: True if the input already contains the cells around the field that the kernels read (`halo`), as
            with domain parallelism. The layer then does not pad its input.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        kernel_sizes: tuple[int, ...],
        stride: int,
        padding: SpherePadding = NO_PADDING,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.padding = padding
        self.input_has_halo = False
        widths = [dim // 2**j for j in range(1, len(kernel_sizes))]
        # The largest kernel is the most expensive. It computes the remaining channels, about as many as the second
        # largest kernel.
        widths.append(dim - sum(widths))
        self.convs = nn.ModuleList(
            nn.Conv2d(in_channels, width, kernel, stride=stride)
            for kernel, width in zip(sorted(kernel_sizes), widths, strict=True)
        )

    @property
    def halo(self) -> tuple[int, int]:
        """Numbers of cells that the largest kernel reads before and after the stride x stride cells of a token."""
        return compute_halo(max(conv.kernel_size[0] for conv in self.convs), self.stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return tokens (B, H // stride, W // stride, dim), where H and W are the size of the padded field.

        Args:
            x_BCHW: field without padding; with `input_has_halo`, the padded field and its halo.
        """
        dtype = autocast_dtype(x_BCHW) or x_BCHW.dtype
        x_BCHW = x_BCHW.to(dtype).contiguous(memory_format=torch.channels_last)
        # Output (B, H / stride, W / stride, width) of each convolution.
        scales: dict[nn.Conv2d, Tensor] = {}
        # Convolutions that `large_kernel_convs` could compute, but that the dispatch leaves to ordinary convolutions.
        replaced_convs: list[nn.Conv2d] = []
        for convs in self._find_large_kernel_groups():
            if not uses_kernel(LARGE_KERNEL_CONV, x_BCHW):
                replaced_convs += convs
                continue
            largest_kernel = convs[-1].kernel_size[0]
            field_BCHW = self._crop_halo(x_BCHW, largest_kernel)
            shape = tuple(field_BCHW.shape[2:])
            grid = PatchGrid(self.stride, largest_kernel, shape, self.padding, self.input_has_halo)
            weights = [conv.weight.to(dtype) for conv in convs]
            biases = [conv.bias.to(dtype) for conv in convs]
            outputs = large_kernel_convs(field_BCHW.permute(0, 2, 3, 1), grid, weights, biases)
            scales |= zip(convs, outputs, strict=True)
        plain_convs = [conv for conv in self.convs if conv not in scales]
        if plain_convs:
            # `large_kernel_convs` pads the field while it gathers patches; ordinary convolutions need a padded field.
            padded_BCHW = self.padding.pad(x_BCHW).contiguous(memory_format=torch.channels_last)
            for conv in plain_convs:
                # In channels-last memory on a CPU, the convolution of torch takes minutes with large kernels (torch
                # 2.13).
                field_BCHW = self._crop_halo(padded_BCHW, conv.kernel_size[0])
                if conv in replaced_convs:
                    field_BCHW = field_BCHW.contiguous()
                if self.input_has_halo:
                    scale_BCHW = F.conv2d(field_BCHW, conv.weight, conv.bias, self.stride)
                else:
                    scale_BCHW = strided_conv(field_BCHW, conv.weight, conv.bias, self.stride)
                scales[conv] = scale_BCHW.permute(0, 2, 3, 1)
        # Concatenate in the order of the kernel sizes, whichever implementation computed each convolution.
        return torch.cat([scales[conv] for conv in self.convs], dim=-1)

    def _crop_halo(self, x_BCHW: Tensor, kernel: int) -> Tensor:
        """Crop the halo of the input to the cells that a kernel of `kernel` x `kernel` cells reads."""
        if not self.input_has_halo:
            return x_BCHW
        before, after = self.halo
        kernel_before, kernel_after = compute_halo(kernel, self.stride)
        skipped = before - kernel_before
        height = x_BCHW.shape[2] - skipped - (after - kernel_after)
        width = x_BCHW.shape[3] - skipped - (after - kernel_after)
        return x_BCHW.narrow(2, skipped, height).narrow(3, skipped, width)

    def _find_large_kernel_groups(self) -> list[list[nn.Conv2d]]:
        """Return the convolutions that `large_kernel_convs` computes faster, in groups that can share patches.

        The convolutions of a group are sorted by kernel size.
        """
        groups: dict[int, list[nn.Conv2d]] = defaultdict(list)
        for conv in self.convs:
            kernel = conv.kernel_size[0]
            consists_of_patches = kernel % self.stride == 0
            # With an odd difference, `strided_conv` pads one more cell on one side than on the other side.
            has_symmetric_pads = (kernel - self.stride) % 2 == 0
            if consists_of_patches and has_symmetric_pads:
                # Kernels that differ by a multiple of twice the stride can read the same grid of patches.
                groups[kernel % (2 * self.stride)].append(conv)
        # The function is faster if the largest kernel of a group (the last kernel) is at least four patches wide.
        worthwhile_groups = []
        for convs in groups.values():
            if convs[-1].kernel_size[0] >= 4 * self.stride:
                worthwhile_groups.append(convs)
        return worthwhile_groups
