"""Part 6. What must hold whatever the numbers are, mostly to the last bit."""

import numpy as np

from gdn2_kernels.audit.cases import decay_case
from gdn2_kernels.audit.measure import BARS, mismatches, row, worst
from gdn2_kernels.audit.subject import ragged_case, run_small

TOKENS = ("dq", "dk", "dv", "dg", "db", "dw")  # gradients with a row for each token


def bits(gate, case, counts, note=""):
    return row(
        "structure",
        gate,
        case,
        sum(counts.values()),
        0,
        result=", ".join(counts),
        note=note or "bits",
    )


def before(found, t):
    return {"o": found["o"][:, :t]}


def causality(subject, case, whole):
    """Later tokens do not touch earlier outputs; a loss on earlier outputs owes nothing
    to later tokens.
    """
    rows, L = [], subject.size.L
    random = np.random.default_rng(31)
    for t in (L // 3, L // 2 + 3):

        def later(x, t=t):
            x = x.copy()
            x[:, t:] = x[:, t:] * random.uniform(0.2, 1.5, x[:, t:].shape)
            return x

        found = subject.run(case.changed(**dict.fromkeys("qkvgbw", later)))
        rows.append(
            bits(
                "causal forward",
                f"o before token {t}",
                mismatches(before(found, t), before(whole, t)),
            )
        )
        do = case.do.copy()
        do[:, t:] = 0
        found = subject.run(case._replace(do=do, d_state=0 * case.d_state))
        owed = {name: int(np.count_nonzero(found[name][:, t:])) for name in TOKENS}
        owed = {name: n for name, n in owed.items() if n}
        rows.append(
            bits("causal backward", f"gradients from token {t} on", owed, "exact zeros")
        )
    return rows


def split(subject, case, whole):
    """The sequence in two calls, the state handed on and its gradient handed back."""
    rows, L = [], subject.size.L
    for t, where in (
        (subject.size.border, "between chunks"),
        (L // 3, "inside a chunk"),
    ):

        def part(start, stop):
            def cut(x):
                x = x[:, start:stop]
                return np.pad(x, [(0, 0), (0, L - x.shape[1]), (0, 0), (0, 0)])

            return case._replace(inputs=[cut(x) for x in case.inputs], do=cut(case.do))

        first, second = part(0, t), part(t, L)
        second = subject.run(second._replace(state=subject.run(first)["final_state"]))
        first = subject.run(first._replace(d_state=second["d_initial_state"]))
        joined = {
            x: np.concatenate([first[x][:, :t], second[x][:, : L - t]], 1)
            for x in ("o", *TOKENS)
        }
        joined |= {
            "final_state": second["final_state"],
            "d_initial_state": first["d_initial_state"],
        }
        error, at = worst(joined, whole)
        same = "identical bits" if not mismatches(joined, whole) else ""
        rows.append(
            row(
                "structure",
                "split",
                where,
                error,
                BARS[subject.precision],
                result=at,
                note=same,
            )
        )
    return rows


def chunk_size(subject, case, whole):
    if not subject.has_chunks:
        return [row("structure", "chunk size", "this stage has no chunks", 0, None)]
    found = subject.run(case, chunk_size=subject.size.chunk_size)
    error, at = worst(found, whole)
    bar = 2 * BARS[subject.precision]  # both are off
    return [
        row(
            "structure",
            "chunk size",
            f"{subject.size.chunk_size} and the usual one",
            error,
            bar,
            result=at,
        )
    ]


def heads_and_batch(subject):
    """Rows and heads in another order, and one of them alone, longer by zeros."""
    size = subject.size
    case = ragged_case(size)
    whole = subject.run(case)

    def turned(x):  # tokens (B, L, H, D) or a state (B, H, K, V)
        return np.flip(x, (0, 2)) if x.shape[1] == size.ragged else np.flip(x, (0, 1))

    other = case._replace(
        inputs=[turned(x) for x in case.inputs],
        state=turned(case.state),
        do=turned(case.do),
        d_state=turned(case.d_state),
    )
    found = {name: turned(x) for name, x in subject.run(other).items()}
    rows = [bits("heads and batch", "both turned round", mismatches(found, whole))]

    def one(x, b, h):
        return (
            x[b : b + 1, :, h : h + 1]
            if x.shape[1] == size.ragged
            else x[b : b + 1, h : h + 1]
        )

    bar = BARS[subject.precision]
    for b, h in ((0, 0), (1, 1)):
        alone = case._replace(
            inputs=[one(x, b, h) for x in case.inputs],
            state=one(case.state, b, h),
            do=one(case.do, b, h),
            d_state=one(case.d_state, b, h),
        )
        expected = {name: one(x, b, h) for name, x in whole.items()}
        found = run_small(subject, alone, expected)
        error, at = worst(found, expected)
        same = "identical bits" if not mismatches(found, expected) else ""
        where = f"row {b}, head {h}: {size.ragged} tokens, with zeros up to {size.L}"
        rows.append(
            row("structure", "padding", where, error, bar, result=at, note=same)
        )
    return rows


def structure(subject):
    case, _ = decay_case(subject.size, "bursts", 3.0)
    whole = subject.run(case)
    rows = [bits("repeat", "two runs", mismatches(subject.run(case), whole))]
    rows += causality(subject, case, whole) + split(subject, case, whole)
    return rows + chunk_size(subject, case, whole) + heads_and_batch(subject)
