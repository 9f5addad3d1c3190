"""python -m gdn2_kernels audit: run it, print it, keep it."""

import argparse
import json
from pathlib import Path

from gdn2_kernels.api import STAGES
from gdn2_kernels.audit.cases import FULL, REDUCED
from gdn2_kernels.audit.packages import PACKAGES, NotInstalled, Package
from gdn2_kernels.audit.report import audit, failures, steps, summary
from gdn2_kernels.environment import banner
from gdn2_kernels.tile import PRECISIONS


def progress(what, total):
    """A function to call as each part begins, and one for the end."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda part: print(f"{what}: {part} ..", flush=True), lambda: None
    bar = tqdm(
        total=total,
        desc=what,
        bar_format="{desc:<40} {bar} {n_fmt}/{total_fmt} {elapsed}",
    )
    begun = []

    def step(part):
        if begun:
            bar.update()
        begun.append(part)
        bar.set_description(f"{what}: {part}")

    def end():
        bar.update()
        bar.close()

    return step, end


def printed(report):
    """The report as text: a line for each gate, then what was not held."""
    lines = [
        f"{report['stage']} at {report['precision']}, {report['seconds']:g} s",
        f"{'part':13}{'gate':17}{'held':>8}   nearest to its bar",
    ]
    for part, gate, held, of, worst in summary(report):
        nearest = f"{float(worst['value']):8.2g} of {worst['bar']:<8.2g}"
        where = f"{nearest} {worst['case']} {worst['result']}"
        lines.append(f"{part:13}{gate:17}{held:4}/{of:<4} {where}"[:110])
    failed = failures(report)
    lines += [
        f"NOT HELD: {x['part']}, {x['gate']}, {x['case']}: "
        f"{x['value']} > {x['bar']} {x['result']}"
        for x in failed
    ]
    return "\n".join(lines if failed else [*lines, "every gate is held"])


def keep(path, reports):
    """Into a JSON file, one line for each row; audits of other stages and precisions
    that it has stay.
    """
    path = Path(path)
    old = json.loads(path.read_text())["audits"] if path.exists() else []
    new = {(x["stage"], x["precision"]) for x in reports}
    audits = [x for x in old if (x["stage"], x["precision"]) not in new] + reports
    audits.sort(key=lambda x: (x["stage"], x["precision"]))
    path.write_text('{"audits": [\n' + ",\n".join(map(_lines, audits)) + "\n]}\n")


def _lines(report):
    parts = []
    for key, value in report.items():
        if isinstance(value, list):
            parts.append(
                f'"{key}": [\n' + ",\n".join(json.dumps(x) for x in value) + "\n]"
            )
        elif key == "tables":
            tables = (
                f'"{name}": [\n' + ",\n".join(json.dumps(x) for x in rows) + "\n]"
                for name, rows in value.items()
            )
            parts.append(f'"{key}": {{' + ",\n".join(tables) + "}")
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{" + ",\n".join(parts) + "}"


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m gdn2_kernels audit",
        description="What a stage computes, against "
        "every gate. Ends with status 1 if one is not held.",
    )
    parser.add_argument(
        "--stage",
        nargs="+",
        default=["mxu"],
        choices=[*STAGES, *PACKAGES],
        help="or a public package, at its most exact only",
    )
    parser.add_argument("--precision", nargs="+", default=["high"], choices=PRECISIONS)
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="keep the reports here; other stages' in the file stay",
    )
    parser.add_argument(
        "--no-controls",
        action="store_true",
        help="leave out the planted errors, part 8",
    )
    parser.add_argument(
        "--reduced",
        action="store_true",
        help="64 tokens, 32 channels: seconds for plain JAX stages",
    )
    options = parser.parse_args(arguments)
    banner()
    ok = True
    for stage in options.stage:
        for precision in options.precision if stage in STAGES else ["highest"]:
            with_controls = not options.no_controls
            size = REDUCED if options.reduced else FULL
            try:
                subject = Package(stage, size) if stage in PACKAGES else None
            except NotInstalled as reason:
                print(reason)
                continue
            step, end = progress(f"{stage}, {precision}", len(steps(with_controls)))
            report = audit(
                stage,
                precision,
                size=size,
                with_controls=with_controls,
                step=step,
                subject=subject,
            )
            end()
            print(printed(report), flush=True)
            if options.json:
                keep(options.json, [report])
            ok = ok and not failures(report)
    return 0 if ok else 1
