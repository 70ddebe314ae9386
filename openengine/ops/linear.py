"""`Linear`: one matrix product for one or several projections that share their input.

Fused projections (q, k, v; gate, up) are rows of one weight. `parts` names them, so that a loader can fill each
part in place and an adapter can find its rows. How the weight is held belongs to one of these, chosen by what there is:

    NativeWeights   compiled kernels: float32, bfloat16, int8                   packed as they are loaded
    Int8Weights     int8 in PyTorch                                             quantized as they are loaded
    DenseWeights    any dtype and device; oneDNN's packed form on a CPU, where  packed by `finish`
                    that works
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.errors import UnsupportedFeature
from openengine.ops.activation import activated
from openengine.ops.linear_native import NativeWeights
from openengine.ops.native import NativeLibrary, native_library
from openengine.ops.quantize import Int8Weights

__all__ = ["DenseWeights", "Linear", "PackedPart", "Weights", "preferred_dtype"]


class Weights(Protocol):
    """A weight [out, in] in a form of its own, with its bias. If it is `gated` its rows are [gate | up]."""

    bias: Tensor | None
    gated: bool
    in_features: int
    out_features: int

    @property
    def kernels(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    def multiply(self, x: Tensor, dtype: torch.dtype, activation: str | None = None) -> Tensor:
        """x [T, in] -> activation(x @ weights.T + bias), [T, out] in `dtype`.

        Of gated weights an activation is that of the gate: `activation(gate) * up`, [T, out / 2].
        """

    def rows(self, ids: Tensor) -> Tensor: ...

    def dense(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedPart:
    """The place of one stored tensor in weights that cannot be viewed: it is written in ranges of rows.

    `shape` is that of the stored tensor, [in, out] if `transposed`. `nbytes` counts it in the dtype it is held in.
    """

    write: Callable[[int, Tensor], None]
    start: int
    shape: tuple[int, int]
    transposed: bool
    nbytes: int

    def fill(self, chunks: Iterable[tuple[slice, Tensor]]) -> None:
        """Write ranges of the stored tensor's first dimension, in order and without gaps, until all is there."""
        if not self.transposed:
            for rows, values in chunks:
                self.write(self.start + (rows.start or 0), values)
            return
        whole: Tensor | None = None
        for rows, values in chunks:
            whole = torch.empty(self.shape, dtype=values.dtype) if whole is None else whole
            whole[rows] = values
        self.write(self.start, whole.T)


class DenseWeights:
    """A plain tensor, and after `pack` oneDNN's form of it where that works.

    oneDNN's form is made beside the plain one. It cannot be read by rows: of a weight that is also a table (`table`)
    both are kept.
    """

    __slots__ = ("_packed", "_plain", "bias", "gated", "in_features", "out_features", "table")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, table: bool = False, gated: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.table = table
        self.gated = gated
        self._plain: Tensor | None = weight
        self._packed: Tensor | None = None

    @property
    def plain(self) -> Tensor:
        """The tensor itself, until `pack`."""
        assert self._plain is not None, "packed weights cannot be written"
        return self._plain

    @property
    def kernels(self) -> str:
        return "torch" if self._packed is None else "onednn"

    @property
    def num_bytes(self) -> int:
        tensors = (self._plain, self.bias)
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        itemsize = 0 if self._packed is None else self._packed.dtype.itemsize
        return held + self.out_features * self.in_features * itemsize

    def pack(self) -> None:
        weight = self.plain
        if weight.device.type == "cpu" and _onednn_packs(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self._plain = weight if self.table else None

    def multiply(self, x: Tensor, dtype: torch.dtype, activation: str | None = None) -> Tensor:
        """See `Weights.multiply`."""
        plain = self._packed is None
        y = F.linear(x, self._plain, self.bias) if plain else _onednn_linear(x, self._packed, self.bias)
        return activated(y, activation, gated=self.gated).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` i64[n] as [n, in]."""
        return F.embedding(ids, self.plain)

    def dense(self) -> Tensor:
        """The weight [out, in]; a copy if it is packed."""
        return self._packed.to_dense() if self._plain is None else self._plain


class Linear:
    """`y = x @ weight.T + bias`, weight [out, in].

    `parts` maps each projection's name to its number of rows, in row order. `transposed` says that the stored form of
    the weight is [in, out].
    """

    __slots__ = ("_finished", "parts", "transposed", "weights")

    def __init__(self, weights: Weights, *, parts: Mapping[str, int], transposed: bool = False) -> None:
        assert sum(parts.values()) == weights.out_features, "parts must cover the rows"
        self.weights = weights
        self.parts = dict(parts)
        self.transposed = transposed
        self._finished = False

    @classmethod
    def empty(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        transposed: bool = False,
        table: bool = False,
        gated: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        native: NativeLibrary | None = None,
    ) -> Linear:
        """Allocate for the rows that `parts` names. With `table`, `rows` will be called too; `gated` as in `Weights`.

        Raises UnsupportedFeature for a quantization that is unknown or cannot run on the device.
        """
        out_features = sum(parts.values())
        weights: Weights
        if quantization not in (None, "int8"):
            raise UnsupportedFeature(f"quantization {quantization!r} is not supported; use 'int8' or None")
        if quantization is not None and device.type != "cpu":
            raise UnsupportedFeature(f"quantization {quantization!r} runs on a CPU only, not on {device}; use None")
        int8 = quantization is not None
        if native is not None and _is_native(dtype, device, int8=int8, table=table):
            weights = NativeWeights(native, out_features, in_features, dtype=dtype, int8=int8, bias=bias, gated=gated)
        elif int8:
            weights = Int8Weights(out_features, in_features, dtype=dtype, bias=bias, gated=gated)
        else:
            weights = DenseWeights(
                torch.empty(out_features, in_features, dtype=dtype, device=device),
                torch.empty(out_features, dtype=dtype, device=device) if bias else None,
                table=table,
                gated=gated,
            )
        return cls(weights, parts=parts, transposed=transposed)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]; a copy where it is held in another form."""
        return self.weights.dense()

    @property
    def bias(self) -> Tensor | None:
        """The bias [out]."""
        return self.weights.bias

    @property
    def num_bytes(self) -> int:
        """Memory the weight and what belongs to it take."""
        return self.weights.num_bytes

    def __call__(
        self,
        x: Tensor,
        *,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`Weights.multiply`, in `dtype` or x's: x [T, in] -> [T, out], or [T, out / 2] of an activated gate.

        `out` [>= T, out] is memory for the result, which is written there or, where the kernels cannot, is fresh.
        """
        if out is not None and isinstance(self.weights, NativeWeights):
            return self.weights.multiply(x, out.dtype, activation, out=out)
        return self.weights.multiply(x, dtype or x.dtype, activation)

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` i64[n], a fresh [n, in]: a head that is also the table of embeddings."""
        return self.weights.rows(ids)

    def tensors(self) -> Iterator[tuple[str, Tensor | PackedPart]]:
        """Each part's stored tensors: a view, which sets the part when it is written, or a `PackedPart`.

        After `finish` they are tensors to read, and writing them may set nothing.
        """
        start = 0
        for name, rows in self.parts.items():
            yield f"{name}.weight", self._part(start, rows)
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + rows]
            start += rows

    def finish(self) -> None:
        """Bring the weight into the form that multiplies; call once, when all is written."""
        self._finished = True
        if isinstance(self.weights, DenseWeights):
            self.weights.pack()

    def _part(self, start: int, rows: int) -> Tensor | PackedPart:
        weights = self.weights
        if self._finished or isinstance(weights, DenseWeights):
            weight = weights.dense()[start : start + rows]
            return weight.T if self.transposed else weight
        shape = (weights.in_features, rows) if self.transposed else (rows, weights.in_features)
        return PackedPart(weights.write, start, shape, self.transposed, rows * weights.in_features * weights.item_bytes)


def preferred_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a model runs fastest there: bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    library = native_library()
    fast = (library is not None and library.levels[-1] == "avx512_bf16") or _cpu_has("avx512_bf16", "amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def _cpu_has(*features: str) -> bool:
    found = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(feature, False) for feature in features)


def _is_native(dtype: torch.dtype, device: torch.device, *, int8: bool, table: bool) -> bool:
    """Whether the native kernels are the best for this weight, if they are there at all."""
    if device.type != "cpu" or not NativeWeights.supports(dtype):
        return False
    # They do not use AMX, and oneDNN does; but its form cannot be a table.
    return int8 or table or dtype != torch.bfloat16 or not _cpu_has("amx_bf16") or not _onednn_packs(dtype)


def _onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed products are there and right: they are no public interface, so one is tried."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    x, weight, bias = (torch.linspace(-1, 1, n, dtype=dtype) for n in (3 * 48, 32 * 48, 32))
    x, weight = x.view(3, 48), weight.view(32, 48)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        result = _onednn_linear(x, packed, bias)
        unpacked = packed.to_dense()
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(unpacked, weight) and torch.allclose(result, F.linear(x, weight, bias), rtol=0.02, atol=0.02)
