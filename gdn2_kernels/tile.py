"""What every stage is made of: matrix products at a stated precision, outside kernels
(`matmul`) and inside (`dot`), cutting a sequence into chunks, and the small things that
kernels do with the rows and columns of an array.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

PRECISIONS = ("default", "high", "highest")


def compute_dtype(*arrays):
    """float64 when every array is float64, else float32: nothing is accumulated in
    bfloat16.
    """
    return jnp.float64 if all(x.dtype == jnp.float64 for x in arrays) else jnp.float32


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 x as (high, low), both float32 numbers that bfloat16 holds exactly.

    |x - high - low| <= 2^-17 |x| for 1e-30 < |x| < 3.3e38.
    """
    # reduce_precision rather than a cast there and back: XLA may drop a pair of casts
    # (xla_allow_excess_precision), never this.
    high = _rounded(x)
    return high, _rounded(x - high)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(a: jax.Array, b: jax.Array, precision: str) -> jax.Array:
    """Product of the last two axes, accumulated in float32, the same bits of work on
    every platform.

    Arguments:
      a: (..., M, K) float32. b: (..., K, N) float32, the same leading axes.
      precision: "default" rounds both to bfloat16 (one pass of a v5e matrix unit),
        "high" keeps a high and a low bfloat16 part and drops low x low (three passes,
        bf16x3), "highest" is a float32 product (six passes on a TPU, plain float32
        elsewhere). float64 operands are multiplied in float64 whatever it says.
    Returns:
      (..., M, N). Its gradient is two products of the same precision.
    """
    # An explicit precision: the meaning must not move with
    # jax_default_matmul_precision.
    exact = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    # DEFAULT is one bfloat16 pass on a TPU, exact for operands that are already
    # bfloat16 values; a CPU multiplies them in float32, exact as well.
    one_pass = functools.partial(jnp.matmul, precision=lax.Precision.DEFAULT)
    if precision == "highest" or a.dtype == jnp.float64:
        return exact(a, b)
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    if precision == "default":
        return one_pass(a_high, b_high)
    small = one_pass(a_high, b_low) + one_pass(a_low, b_high)
    return one_pass(a_high, b_high) + small


def _matmul_fwd(a, b, precision):
    return matmul(a, b, precision), (a, b)


def _matmul_bwd(precision, operands, d_out):
    # Left to itself, autodiff would send the cotangent through reduce_precision: a
    # bfloat16 gradient.
    a, b = operands
    return matmul(d_out, b.mT, precision), matmul(a.mT, d_out, precision)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def dot(a, b, precision, *, transpose_a=False, transpose_b=False):
    """`matmul` for the inside of a Pallas kernel: two matrices, no gradient.

    Arguments:
      a: (M, K) float32, or (K, M) with `transpose_a`.
      b: (K, N) float32, or (N, K) with `transpose_b`. On a v5e a transposed b costs
        about a fifth more than a plain one, a transposed a two thirds more.
      precision: as of `matmul`, and the same numbers: compiled or interpreted, whatever
        jax_default_matmul_precision says.
    Returns:
      (M, N) float32.
    """
    turned = transpose_a, transpose_b
    if precision == "highest":
        return exact(a, b, *turned)
    if precision == "default":
        return one_pass(a, b, *turned)
    a_high, b_high = high_part(a), high_part(b)
    small = one_pass(a_high, b - b_high, *turned) + one_pass(a - a_high, b_high, *turned)
    return one_pass(a_high, b_high, *turned) + small


def _product(a, b, transpose_a, transpose_b, precision):
    contracted = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(
        a,
        b,
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def one_pass(a, b, transpose_a=False, transpose_b=False):
    """`dot` of operands rounded to bfloat16."""
    a, b = _as_operand(a), _as_operand(b)
    return _product(a, b, transpose_a, transpose_b, lax.Precision.DEFAULT)


def exact(a, b, transpose_a=False, transpose_b=False):
    """`dot` in float32."""
    return _product(a, b, transpose_a, transpose_b, lax.Precision.HIGHEST)


# Compiled by Mosaic, float32 operands at DEFAULT precision are rounded to bfloat16 by
# the matrix unit itself, and a cast there and back stays what it is. Interpreted, the
# kernel is an XLA program: there operands keep all their bits and XLA may drop the pair
# of casts (see `split`), so the rounding is written out. On a v5e reduce_precision does
# not exist and an explicit bfloat16 operand costs six vector operations per register.


def _as_operand(x):
    """x as one pass of the matrix unit sees it."""
    return lax.platform_dependent(x, mosaic=lambda x: x, default=_rounded)


def high_part(x):
    """Inside a kernel, the part of x that bfloat16 holds, as float32."""
    return lax.platform_dependent(x, mosaic=_cast_there_and_back, default=_rounded)


def _cast_there_and_back(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _rounded(x):
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def to_chunks(x: jax.Array, chunk_size: int, N: int) -> jax.Array:
    """(B, L, H, D) -> (N, B*H, C, D), the tail filled with zeros up to N chunks.

    Zeros are tokens that do nothing: g = 0 decays nothing, k = 0 writes and erases
    nothing, and what q = 0 reads is cut off again by `from_chunks`.
    """
    B, L, H, D = x.shape
    x = jnp.pad(x, ((0, 0), (0, N * chunk_size - L), (0, 0), (0, 0)))
    x = x.reshape(B, N, chunk_size, H, D).transpose(1, 0, 3, 2, 4)
    return x.reshape(N, B * H, chunk_size, D)


def from_chunks(x: jax.Array, B: int, L: int) -> jax.Array:
    """(N, B*H, C, D) -> (B, L, H, D), the filling cut off."""
    N, heads, C, D = x.shape
    x = x.reshape(N, B, heads // B, C, D).transpose(1, 0, 3, 2, 4)
    return x.reshape(B, N * C, heads // B, D)[:, :L]


# ------------------------------------------------------ inside a kernel

# Under x64 a Python number is 64 bits wide, which the chip does not have: hence
# `int32` for the distance of a roll, and `only` in the place of a bare jnp.where.


# NumPy's type, which makes numbers: jnp.int32 would make an array, and a kernel may not
# hold on to one.
int32 = jnp.dtype("int32").type


def f32(x):
    """A ref or an array as float32: a v5e has no bfloat16 arithmetic."""
    return x[...].astype(jnp.float32)


def rows(shape):
    """The row of each element, int32."""
    return lax.broadcasted_iota(jnp.int32, shape, 0)


def columns(shape):
    """The column of each element, int32."""
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def only(where, x, otherwise=0):
    """x, and a number elsewhere."""
    return jnp.where(where, x, jnp.full_like(x, otherwise))


def lower(x, diagonal=True):
    """x (C, C) with zeros above its diagonal, or on it too."""
    row, column = rows(x.shape), columns(x.shape)
    return only(row >= column if diagonal else row > column, x)


def roll(x, down):
    """Rows moved `down` places (up if negative), around the end."""
    return pltpu.roll(x, int32(down % x.shape[0]), 0)


def shift(x, down):
    """Rows moved `down` places (up if negative), rows without a source zero."""
    row = rows(x.shape)
    return only(row >= down if down > 0 else row < x.shape[0] + down, roll(x, down))


# Running sums along the rows of (C, D). All are sums of what they name: an exclusive
# one is never an inclusive one minus a term, which would lose the digits that the two
# have in common.


def sum_up_to(x):
    """Row t: rows 0 .. t summed."""
    step = 1
    while step < x.shape[0]:
        x = x + shift(x, step)
        step *= 2
    return x


def sum_from(x):
    """Row t: rows t, t+1, .. summed."""
    step = 1
    while step < x.shape[0]:
        x = x + shift(x, -step)
        step *= 2
    return x


def sum_before(x):
    """Row t: rows 0 .. t-1 summed."""
    return shift(sum_up_to(x), 1)


def sum_after(x):
    """Row t: rows t+1, t+2, .. summed."""
    return shift(sum_from(x), -1)


def between_halves(A, h):
    """The part of a strictly lower A (C, C) where the row is in the later, the column
    in the earlier half of the same block of 2h: the highest bit in which they differ
    is h.
    """
    differ = rows(A.shape) ^ columns(A.shape)
    return only((differ >= h) & (differ < 2 * h), A)


def inverse(A, precision):
    """(I + A)^-1 of a strictly lower A (C, C) by doubling the blocks on the diagonal:
    X <- X - X M X, where M is the part of A between two neighbours.

    A generator that pauses after each product, because the next one has to wait for it:
    a kernel may do something else meanwhile. Its return value is the inverse.
    """
    C = A.shape[0]
    identity = (rows(A.shape) == columns(A.shape)).astype(jnp.float32)
    X = identity - between_halves(A, 1)
    h = 2
    while h < C:
        MX = dot(between_halves(A, h), X, precision)
        yield
        X = X - dot(X, MX, precision)
        yield
        h *= 2
    return X


def in_step(generators):
    """A generator that advances others in turn, each to its next yield, then each to the
    one after, and yields after every move. Returns what they return.
    """
    running, results = dict(enumerate(generators)), {}
    while running:
        for i, generator in [*running.items()]:
            try:
                next(generator)
            except StopIteration as end:
                results[i] = end.value
                del running[i]
            yield
    return [results[i] for i in sorted(results)]


def side_by_side(generators):
    """Run generators in step, to their ends. Returns what they return.

    The compiler overlaps what stands near in the program. A product takes 131 cycles to
    come back; between two yields the others have work that does not wait for it.
    """
    steps = in_step(generators)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
