"""Draw book/images/ladder.svg, the picture on the first page: python tools/readme_picture.py

Mid-tone ink on no ground, so that it can be read on a light and on a dark page.
"""

from pathlib import Path

STEPS = [
    ("recurrence", "one token at a time", "#3b82c4"),
    ("associative_scan", "all tokens in log depth", "#c2702c"),
    ("wy", "chunks as matrix products", "#2f9266"),
    ("atomic_ops", "nine Pallas launches", "#a2569c"),
    ("atomic_gdn2", "two, the state in VMEM", "#b8860b"),
    ("mxu", "decays as matrix products", "#1f9aa8"),
]
INK = "#7d8790"
WIDTH, ROW, INDENT = 540, 44, 32


def main() -> None:
    names = ", ".join(name for name, *_ in STEPS)
    foot = 14 + ROW * len(STEPS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 46}" role="img" font-family="sans-serif">',
        f"<title>{names}: each checked against one float64 oracle</title>",
    ]
    # The first stage is the lowest step; each later one stands further right.
    for index, (name, what, colour) in enumerate(STEPS):
        x, y = 12 + index * INDENT, foot - ROW * (index + 1)
        parts += [
            f'<rect x="{x}" y="{y}" width="{WIDTH - 12 - x}" height="{ROW - 6}" rx="6" fill="{colour}" '
            f'fill-opacity="0.14" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{x + 12}" y="{y + 25}" font-size="17" font-weight="bold" fill="{colour}">{name}</text>',
            f'<text x="{WIDTH - 24}" y="{y + 25}" text-anchor="end" font-size="16" fill="{INK}">{what}</text>',
        ]
    parts += [
        f'<rect x="12" y="{foot}" width="{WIDTH - 24}" height="36" rx="6" fill="none" stroke="{INK}" '
        'stroke-dasharray="5 4"/>',
        f'<text x="{WIDTH / 2}" y="{foot + 23}" text-anchor="middle" font-size="16" fill="{INK}">'
        "one function, one float64 oracle: outputs and gradients</text>",
        "</svg>\n",
    ]
    target = Path(__file__).resolve().parent.parent / "book" / "images" / "ladder.svg"
    target.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
