"""Draw book/images/ladder.svg, the picture on the first page: python tools/readme_picture.py

Mid-tone ink on no ground, so that it can be read on a light and on a dark page.
"""

from pathlib import Path

STEPS = [
    ("recurrence", "one token", "at a time", "#3b82c4"),
    ("associative_scan", "all tokens", "in log depth", "#c2702c"),
    ("wy", "chunks as", "matrix products", "#2f9266"),
]
INK = "#7d8790"
WIDTH, HEIGHT, STEP, RISE = 540, 250, 172, 42


def main() -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif">',
        "<title>recurrence, associative_scan and wy, each checked against one float64 oracle</title>",
    ]
    for index, (name, what, how, colour) in enumerate(STEPS):
        x, y = 12 + index * STEP, 100 - index * RISE
        middle = x + STEP / 2
        parts += [
            f'<rect x="{x + 3}" y="{y}" width="{STEP - 6}" height="{190 - y}" rx="6" fill="{colour}" fill-opacity="0.14" '
            f'stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{middle}" y="{y + 26}" text-anchor="middle" font-size="18" font-weight="bold" '
            f'fill="{colour}">{name}</text>',
            f'<text x="{middle}" y="{y + 49}" text-anchor="middle" font-size="16" fill="{INK}">{what}</text>',
            f'<text x="{middle}" y="{y + 69}" text-anchor="middle" font-size="16" fill="{INK}">{how}</text>',
        ]
    parts += [
        f'<rect x="15" y="200" width="{WIDTH - 30}" height="36" rx="6" fill="none" stroke="{INK}" stroke-dasharray="5 4"/>',
        f'<text x="{WIDTH / 2}" y="223" text-anchor="middle" font-size="16" fill="{INK}">'
        "one function, one float64 oracle: outputs and gradients</text>",
        "</svg>\n",
    ]
    target = Path(__file__).resolve().parent.parent / "book" / "images" / "ladder.svg"
    target.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
