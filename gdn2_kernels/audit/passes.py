"""Part 9. What a product of one, three or six passes is worth, inside the stage.

Nothing decays or is erased, and token j writes the unit vector e_j: then o is the
matrix of scores q k^T below its diagonal, one product, carried through a second one
with a matrix of ones and zeros.
"""

import numpy as np

from gdn2_kernels.audit.cases import Case
from gdn2_kernels.audit.measure import row

# Relative to sum |a||b|, in the worst case. Each bfloat16 has 8 bits, u = 2^-8: one
# pass rounds two operands (2u, and u^2), three leave out low x low and the rest of
# either operand (3 u^2). Float32 rounds the sum of D terms. The second product rounds
# the score once more.
BOUNDS = {
    "default": lambda D: 2 * 2.0**-8 + 2.0**-16 + 2.0**-8,
    "high": lambda D: 3 * 2.0**-16 + 2.0**-16 + D * 2.0**-24,
    "highest": lambda D: (D + 4) * 2.0**-24,
}


def product_case(size, operands):
    """operands: "random", or "worst": all of one sign and just below a power of two
    behind the first eight bits, where three passes leave out most.
    """
    random = np.random.default_rng(51)
    n = min(size.L, size.D)

    def tokens():
        x = np.zeros((1, size.L, 1, size.D))
        if operands == "random":
            x[0, :n, 0] = random.normal(size=(n, size.D))
        else:
            # 1 + a little less than half of the last bit of bfloat16: rounded down
            x[0, :n, 0] = 1 + 2.0**-8 * random.uniform(0.9, 0.99, (n, size.D))
        return x

    q, k, v = tokens(), tokens(), np.zeros((1, size.L, 1, size.D))
    v[0, :n, 0, :n] = np.eye(n)
    nothing = np.zeros((1, 1, size.D, size.D), np.float32)
    inputs = [np.float32(x) for x in (q, k, v, 0 * k, 0 * k, np.ones_like(v))]
    return Case(inputs, nothing, np.zeros_like(inputs[2]), nothing, 1.0), n


def passes(subject):
    rows = []
    for operands in ("random", "worst"):
        case, n = product_case(subject.size, operands)
        q, k = (np.float64(x[0, :n, 0]) for x in case.inputs[:2])
        exact, size = np.tril(q @ k.T), np.tril(np.abs(q) @ np.abs(k).T)
        found = subject.run(case)["o"][0, :n, 0, :n].astype(np.float64)
        below = size > 0
        share = float(np.max(np.abs(found - exact)[below] / size[below]))
        bound = BOUNDS[subject.precision](subject.size.D)
        rows.append(
            row(
                "passes",
                "product",
                f"{operands} operands, of sum |a||b|",
                share,
                bound,
                result="o",
            )
        )
    return rows
