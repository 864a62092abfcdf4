"""The kernels of this package called from JAX: the host functions of `kernels_pallas`, by jax-triton. The only file here
that imports JAX.

A host function of this package decides everything about a launch from shapes and dtypes. So it runs here on meta tensors
with a recorder in place of the launch, and what it recorded becomes a custom call: the same kernel, grid and numbers. What
it writes in place is an operand that shares its memory with a result; what it allocates is a result. Numbers that are
arguments of a launch from PyTorch become constants of the compiled kernel. One launch a host function.
"""

from __future__ import annotations

import os
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import torch

from kernels_triton import commit as _commit
from kernels_triton import conv as _conv
from kernels_triton import decode, gates, history, materialize, precompute, project
from kernels_triton import windows as _windows
from kernels_triton.launch import recorder

_cache_dir = os.environ.get("TRITON_CACHE_DIR")
from jax_triton import triton_lib  # noqa: E402

# jax-triton clears the variable for every user of Triton in this process
if _cache_dir is None:
    os.environ.pop("TRITON_CACHE_DIR", None)
else:
    os.environ["TRITON_CACHE_DIR"] = _cache_dir


def _meta(x: jax.Array) -> torch.Tensor:
    return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta")


def _aval(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(str(x.dtype).removeprefix("torch.")))


def _record(host, args, static):
    """(what host(*args) returns, {id: array behind a meta tensor}, its launch or None); args: nested tuples of arrays."""
    arrays, launches = {}, []

    def meta(x):
        tensor = _meta(x)
        arrays[id(tensor)] = x
        return tensor

    args = jax.tree.map(meta, args)
    token = recorder.set(lambda *launch: launches.append(launch))
    try:
        returned = host(*args, **static)
    finally:
        recorder.reset(token)
    if len(launches) > 1:
        raise ValueError(f"{host.__name__} made {len(launches)} launches: a host function called from JAX makes one")
    # the meta tensors live as long as their ids are used
    return returned, arrays, launches[0] if launches else None, args


def _arrays(kernel, values, arrays, written):
    """Split the arguments of a launch: (operands, results among the arguments, numbers by name).

    XLA hands a custom call its operands, then its results, and they are passed on in this order: arrays that exist come
    first in a signature, then those which the host function allocated. A written array that comes once more is its result.
    """
    operands, results, numbers = [], [], {}
    for name, value in zip(kernel.arg_names, values, strict=False):
        if not isinstance(value, torch.Tensor):
            numbers[name] = getattr(value, "value", value)
            continue
        x = arrays.get(id(value), value)
        again = any(x is w for w in written) and any(x is o for o in operands)
        if numbers or (results and x is not value and not again):
            raise ValueError(f"{kernel.__name__}: argument {name!r} is out of order: arrays, allocated arrays, numbers")
        (results if x is value or again else operands).append(x)
    return operands, results, numbers


def _run(host, written, *args, extra=(), **static):
    """`host(*args, **static)`, which writes the arrays `written` in place: (allocated arrays, written and extra arrays).

    extra: arrays that the kernel does not take; whoever reads them afterwards comes after this call.
    """
    returned, arrays, launch, _alive = _record(host, args, static)
    returned = returned if isinstance(returned, tuple) else (returned,)
    fresh = [x for x in returned if id(x) not in arrays]
    if launch is None:
        return [jnp.zeros(_aval(x).shape, _aval(x).dtype) for x in fresh], [*written, *extra]
    kernel, grid, values, *options = launch
    operands, results, numbers = _arrays(kernel, values, arrays, written)
    types = [triton_lib.get_triton_type(jax.core.ShapedArray(x.shape, x.dtype)) for x in [*operands, *map(_aval, results)]]
    if extra and results:
        raise ValueError(f"{kernel.__name__}: extra arrays come after the operands, where this kernel expects results")
    operands += extra
    results += [x for x in (*written, *extra) if not any(x is y for y in results)]
    out = jax.ffi.ffi_call(
        "triton_kernel_call",
        [_aval(x) for x in results],
        input_output_aliases={_find(operands, x): i for i, x in enumerate(results) if not isinstance(x, torch.Tensor)},
        custom_call_api_version=2,
        legacy_backend_config=_compiled(kernel, types, grid, numbers, *options),
    )(*operands)
    return [out[_find(results, x)] for x in fresh], [out[_find(results, x)] for x in (*written, *extra)]


def _find(arrays, x) -> int:
    return next(i for i, y in enumerate(arrays) if y is x)


def _compiled(kernel, types, grid, numbers, num_warps: int, registers: int | None) -> bytes:
    """Backend configuration of a custom call: the compiled kernel, its grid, and one pointer an array."""
    lib = triton_lib.triton_kernel_call_lib

    def backend(device, compute_capability):
        backend = triton_lib.get_cuda_backend(device, compute_capability)
        if registers is not None:  # an option of Triton that jax-triton does not pass on
            parse = backend.parse_options
            backend.parse_options = lambda options: parse(options | {"maxnreg": registers})
        return backend

    module, _ = triton_lib.get_or_create_triton_kernel(
        backend, "cuda", kernel, types, (), num_warps=num_warps, num_stages=1, num_ctas=1, compute_capability=None,
        enable_fp_fusion=False, metaparams=numbers, dump=False,
    )  # fmt: skip
    pointers = [lib.create_array_parameter(0, 16) for _ in types]
    call = lib.TritonKernelCall(module, *grid, *(1,) * (3 - len(grid)), pointers)
    return zlib.compress(call.to_proto(kernel.__name__, b""))


# --------------------------------------------------------------------- the host functions, as kernels_pallas documents them


def _row(row) -> jax.Array:
    return jnp.asarray(row, jnp.int32).reshape(1)


def prologue(q, k, a, b, A_log, dt_bias, *, scale: float, lower_bound: float | None = None):
    return tuple(_run(gates.prologue, (), q, k, a, b, A_log, dt_bias, scale=scale, lower_bound=lower_bound)[0])


def native(state, row, slots, offset, verify_len, cu, inputs, **static):
    (o,), (state,) = _run(decode.native, (state,), state, _row(row), slots, offset, verify_len, cu, inputs, **static)
    return o, state


def compact(state, window, row, slots, verify_len, cu, inputs, k_raw, **static):
    args = (state, window, _row(row), slots, verify_len, cu, inputs, k_raw)
    (o,), window = _run(decode.compact, window, *args, **static)
    return o, tuple(window)


def commit(state, k, v, decay, beta, slots, lengths, **static):
    _, (state,) = _run(_commit.commit, (state,), state, k, v, decay, beta, slots, lengths, **static)
    return state


def conv(pool, row, slots, offset, verify_len, cu, x, weight, bias=None, **static):
    (y,), (pool,) = _run(_conv.conv, (pool,), pool, _row(row), slots, offset, verify_len, cu, x, weight, bias, **static)
    return y, pool


def advance(state, pools, count, items, *, target=None, token=None, **static):
    def host(state, pools, count, items, target, **static):
        return materialize.advance(state, pools, count, items, target=target, **static)

    written, extra = state if target is None else target, () if token is None else (token,)
    _, out = _run(host, (written,), state, pools, count, items, target, extra=extra, **static)
    return out[0] if token is None else tuple(out)


def windows(pool, offset, count, slots, page_ids, target, **static):
    _, (target,) = _run(_windows.windows, (target,), pool, offset, count, slots, page_ids, target, **static)
    return target


def prepare(state, pools, cursor, forward_cursor, slots, verify_len, **static):
    plan = (cursor, forward_cursor, slots, verify_len)
    (work, count), (cursor, forward_cursor) = _run(history.plan, plan[:2], *plan, length=pools[0].shape[3] // 2)
    state, forward_cursor = advance(state, pools, count, (work,), token=forward_cursor, **static)
    return state, cursor, forward_cursor


def _coefficients(projection, index, cursor, tokens, pools, **static):
    window, pools = _run(projection.coefficients, pools, index, cursor, tokens, pools, **static)
    return *window, pools


def _outputs(projection, index, cursor, v, window, state, pools, **static):
    (o,), pools = _run(projection.outputs, pools, index, cursor, v, tuple(window), state, pools, **static)
    return o, pools


coefficients, outputs = partial(_coefficients, project), partial(_outputs, project)
precompute_coefficients, precompute_outputs = partial(_coefficients, precompute), partial(_outputs, precompute)
