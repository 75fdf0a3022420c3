# SPDX-License-Identifier: Apache-2.0
"""Draw the sequence diagram of a request: `python scripts/draw_request.py` writes docs/request.svg.

Plain SVG without a script or a font of its own, so that it shows offline and wherever Markdown
does. A test compares the file with what this prints.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "request.svg"

PARTICIPANTS = ("Client", "Front end", "Scheduler", "Block pool", "Worker")
# (from, to, text): an arrow; (at, at, text): a note; (first, last) of a frame's rows come below.
ROWS = (
    ("Client", "Front end", "prompt, vllm_xargs"),
    ("Front end", "Front end", "1 check settings"),
    ("Front end", "Scheduler", "request"),
    ("Scheduler", "Scheduler", "2 plan: kept, skip per layer"),
    ("Scheduler", "Scheduler", "3 wait until admitted"),
    ("Scheduler", "Block pool", "4 allocate, all layers"),
    ("Scheduler", "Worker", "chunk of the prompt"),
    ("Worker", "Worker", "5 full attention"),
    ("Worker", "Worker", "6 score, select, compact"),
    ("Worker", "Scheduler", "first token, number of evicted tokens"),
    ("Scheduler", "Scheduler", "7 compare with the plan"),
    ("Scheduler", "Block pool", "8 free the blocks in front"),
    ("Scheduler", "Client", "first token"),
    ("Scheduler", "Block pool", "9 allocate a block if needed"),
    ("Scheduler", "Worker", "next step"),
    ("Worker", "Worker", "10 attention behind skip"),
    ("Worker", "Scheduler", "token"),
    ("Scheduler", "Client", "token"),
    ("Scheduler", "Block pool", "11 free all blocks"),
    ("Scheduler", "Client", "last token, kv_transfer_params"),
)
# (first row, last row, title)
FRAMES = (
    (5, 7, "for each chunk of the prompt"),
    (8, 8, "in the last chunk, layer by layer"),
    (13, 17, "for each generated token"),
)

COLUMN, ROW, LEFT, TOP, BOX = 200, 38, 100, 92, 130
WIDTH = COLUMN * (len(PARTICIPANTS) - 1) + 2 * LEFT + 60
HEIGHT = TOP + ROW * len(ROWS) + 12


def _x(name: str) -> int:
    return LEFT + COLUMN * PARTICIPANTS.index(name)


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def draw() -> str:
    """The whole SVG file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        "<title>The path of a request</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="#222"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for first, last, title in FRAMES:
        top = TOP + ROW * first - 28
        height = ROW * (last - first + 1) + 2
        parts.append(
            f'<rect x="20" y="{top}" width="{WIDTH - 40}" height="{height}" fill="#eef3fa" '
            'stroke="#9ab"/>'
        )
        parts.append(_text(28, top + 15, title, "start", ' font-style="italic" fill="#345"'))
    for name in PARTICIPANTS:
        x = _x(name)
        parts.append(
            f'<line x1="{x}" y1="46" x2="{x}" y2="{HEIGHT - 8}" stroke="#999" '
            'stroke-dasharray="4 4"/>'
        )
        parts.append(
            f'<rect x="{x - BOX // 2}" y="14" width="{BOX}" height="32" rx="4" fill="#fff" '
            'stroke="#222"/>'
        )
        parts.append(_text(x, 35, name, style=' font-weight="bold"'))
    for row, (source, target, text) in enumerate(ROWS):
        y, start, end = TOP + ROW * row, _x(source), _x(target)
        if source == target:
            width = 7 * len(text) + 14
            parts.append(
                f'<rect x="{start - width / 2:g}" y="{y - 18}" width="{width}" height="24" '
                'fill="#fff7d6" stroke="#b90"/>'
            )
            parts.append(_text(start, y - 1, text))
            continue
        parts.append(
            f'<line x1="{start}" y1="{y}" x2="{end}" y2="{y}" stroke="#222" '
            'marker-end="url(#head)"/>'
        )
        parts.append(_text((start + end) / 2, y - 5, text))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
