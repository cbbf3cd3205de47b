"""The pictures of docs/pictures, as text: `python docs/tools/pictures.py` writes them anew."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
INK, GREY, PALE, LINE = "#222222", "#6b7280", "#f3f4f6", "#c5cad3"
BLUE, GREEN, RED, YELLOW = "#2a7de1", "#3a9a5b", "#c0504d", "#e1a02a"
PALE_BLUE, PALE_GREEN, PALE_RED = "#dbe9fb", "#dff1e4", "#f7dfde"

# Shares in percent of rounds that accepted the draft at position 1, 2, 3, 4: measured, from the table of
# checkpoints/smollm2-135m-eagle3/README.md, which has the command.
ACCEPTANCE = {
    "tree of 12 nodes, greedy": (85, 68, 48, 31),
    "chain, greedy": (68, 45, 32, 23),
    "chain, temperature 0.7": (66, 45, 28, 19),
}


class Picture:
    """An SVG on a white sheet, which dark pages show too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>',
        ]
        self.box(0, 0, width, height, fill="#ffffff", line="none", radius=8)

    def box(self, x: float, y: float, w: float, h: float, fill=PALE, line=LINE, dashed=False, radius=4) -> None:
        """Draw a rectangle from its upper left corner."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        shape = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"'
        self.parts.append(f'<rect {shape} fill="{fill}" stroke="{line}"{dash}/>')

    def text(self, x: float, y: float, words: str, colour=INK, at="middle", size=14, bold=False) -> None:
        """Write a line. y: its base line. at: the place of x in the line."""
        weight = ' font-weight="bold"' if bold else ""
        how = f'x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{at}" font-size="{size}"{weight}'
        self.parts.append(f"<text {how}>{escape(words)}</text>")

    def cell(self, x: float, y: float, w: float, h: float, words: str, fill=PALE, line=LINE, colour=INK, dashed=False):
        """Draw a box with a word in its middle."""
        self.box(x, y, w, h, fill, line, dashed)
        self.text(x + w / 2, y + h / 2 + 5, words, colour)

    def line(self, *points: tuple[float, float], colour=GREY, width=1.3, arrow=True) -> None:
        """Draw a line through points, with an arrow's tip at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{tip}/>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def the_round() -> Picture:
    """Draw one greedy round of one row, K = 4, of which two drafts are accepted."""
    picture = Picture(900, 424, "One round: propose, score, verify, commit")
    left, step, width, height = 116, 76, 70, 32
    before, drafts = ["The", "capital", "of", "France", "is"], ["Paris", ",", "the", "city"]
    outputs = ["Paris", ",", "and", "…", "…"]

    def tokens(words: Sequence[str], first: int, y: float, **how) -> None:
        for i, word in enumerate(words):
            picture.cell(left + step * (first + i), y, width, height, word, **how)

    def stage(y: float, name: str) -> None:
        picture.text(34, y + 21, name, at="start", bold=True)

    tokens(before[:-1], 0, 18)
    tokens(before[-1:], 4, 18, fill=PALE_BLUE, line=BLUE)
    picture.text(left + step * 5 + 2, 39, "the last token is pending: no pass has read it yet", GREY, "start", 13)

    stage(82, "propose")
    tokens(drafts, 5, 82, fill=PALE_GREEN, line=GREEN, dashed=True)
    picture.text(left + step * 5 - 12, 103, "a cheap drafter makes K = 4 drafts", GREY, "end", 13)

    stage(146, "score")
    picture.box(left + step * 4, 146, step * 4 + width, height, PALE_BLUE, BLUE)
    picture.text(left + step * 6.5 - 3, 167, "one pass of the target over K + 1 = 5 tokens")
    for i in range(5):
        x = left + step * (4 + i) + width / 2
        picture.line((x, 178), (x + step, 206))
    tokens(outputs[:3], 5, 210, line=BLUE)
    tokens(outputs[3:], 8, 210, colour=GREY)
    picture.text(left + step * 5 - 12, 231, "the target's own token after each of them", GREY, "end", 13)

    stage(262, "verify")
    for i, (words, colour) in enumerate([("equal", GREEN), ("equal", GREEN), ("differs", RED)]):
        picture.text(left + step * (5 + i) + width / 2, 283, words, colour, bold=True)
    picture.text(left + step * 8, 283, "not used", GREY, "start", 13)
    picture.text(left + step * 5 - 12, 283, "accept drafts up to the first difference", GREY, "end", 13)

    stage(320, "commit")
    tokens(before, 0, 320)
    tokens(drafts[:2], 5, 320, fill=PALE_GREEN, line=GREEN)
    tokens(outputs[2:3], 7, 320, fill=PALE_BLUE, line=BLUE)
    picture.text(left + step * 8, 341, "pending from now on", GREY, "start", 13)
    picture.text(left + step * 5, 376, "two accepted drafts and one token of the target", INK, "start", 13)

    picture.line((left + 30, 356), (left + 30, 396), (16, 396), (16, 34), (left - 6, 34))
    remark = "next round, in the same device program; the host gets the tokens of up to 64 rounds together"
    picture.text(left + 42, 400, remark, GREY, "start", 13)
    return picture


def pages() -> Picture:
    """Draw two rows in the paged cache, and a round of one of them that rejects two of three drafts."""
    picture = Picture(900, 470, "Pages, block tables, the slots of a round, and a rejection")
    size, cell = 4, 40  # positions a page holds; width of a slot
    tables = {"row A": [2, 5, 0, 6], "row B": [2, 4]}

    picture.text(24, 34, "block tables", at="start", bold=True)
    for i, (name, table) in enumerate(tables.items()):
        y, fill, line = 52 + 62 * i, (PALE_BLUE, PALE_GREEN)[i], (BLUE, GREEN)[i]
        picture.text(24, y + 21, name, at="start")
        for j, page in enumerate(table):
            picture.cell(78 + 48 * j, y, 44, 32, str(page), fill, line)
    picture.text(24, 188, "Both begin alike, so page 2 is in both tables.", GREY, "start", 13)
    picture.text(24, 208, "Target and draft use the same tables.", GREY, "start", 13)

    picture.text(360, 34, "pool of pages, S = 4 positions each", at="start", bold=True)
    held = {2: ["A0 B0", "A1 B1", "A2 B2", "A3 B3"], 5: ["A4", "A5", "A6", "A7"], 0: ["A8", "A9", "A10", "A11"]}
    held |= {4: ["B4", "B5", "B6", ""], 6: ["A12", "", "", ""]}
    for page in range(8):
        x, y = 360 + (page % 3) * 176, 52 + (page // 3) * 62
        picture.text(x, y + 48, f"page {page}", GREY, "start", 12)
        for offset in range(size):
            words = held.get(page, [""] * size)[offset]
            fill, line = ("#ffffff", LINE)
            if words.startswith("A"):
                fill, line = PALE_BLUE, BLUE
            if words.startswith("B"):
                fill, line = PALE_GREEN, GREEN
            if words in ("A9", "A10"):
                fill, line = BLUE, BLUE
            if words in ("A11", "A12"):
                fill, line = PALE_RED, RED
            picture.box(x + cell * offset, y, cell, 32, fill, line, radius=0)
            if " " in words:
                for k, word in enumerate(words.split()):
                    picture.text(x + cell * (offset + 0.5), y + 13 + 14 * k, word, GREEN if k else BLUE, size=12)
            else:
                picture.text(x + cell * (offset + 0.5), y + 21, words, "#ffffff" if fill == BLUE else INK, size=13)

    picture.line((24, 244), (876, 244), colour=LINE, arrow=False)
    title = "a round of row A: 10 tokens and K = 3 drafts; the target writes K + 1 = 4 slots"
    picture.text(24, 272, title, at="start", bold=True)
    rows = [
        ("token", ["pending", "draft 1", "draft 2", "draft 3"]),
        ("position", ["9", "10", "11", "12"]),
        ("page, by the table", ["0", "0", "0", "6"]),
        ("slot = page x S + position mod S", ["1", "2", "3", "24"]),
    ]
    for i, (name, values) in enumerate(rows):
        y = 286 + 30 * i
        picture.text(24, y + 20, name, at="start", size=13)
        for j, value in enumerate(values):
            fill, line, colour = (BLUE, BLUE, "#ffffff") if j < 2 else (PALE_RED, RED, INK)
            picture.cell(270 + 84 * j, y, 80, 28, value, fill, line, colour)
    remarks = [
        ("Draft 1 is accepted, draft 2 is not:", INK),
        ("12 tokens, with the target's own.", INK),
        ("Positions 0 to 10 are valid.", BLUE),
        ("Slots 3 and 24 are stale: never read.", RED),
    ]
    for i, (words, colour) in enumerate(remarks):
        picture.text(624, 305 + 30 * i, words, colour, "start", 13)
    remarks = [
        (
            "The rollback is the lower length alone: nothing is copied or cleared. The next round writes position 11,",
            GREY,
        ),
        ("where the target's own token is now pending, over the stale slot.", GREY),
    ]
    for i, (words, colour) in enumerate(remarks):
        picture.text(24, 438 + 18 * i, words, colour, "start", 13)
    return picture


def tree() -> Picture:
    """Draw a tree of drafts and which nodes each node sees in the target's pass."""
    picture = Picture(900, 420, "A tree of drafts and its mask")
    words = ["is", "Paris", "the", "located", ",", ".", "city", "the", "and"]
    parents = [None, 0, 0, 0, 1, 1, 2, 4, 4]
    places = [(22, 184), (134, 84), (134, 196), (134, 308), (256, 52), (256, 116), (256, 196), (378, 28), (378, 84)]
    accepted = {1, 4, 8}
    width, height, top = 84, 34, 28

    picture.text(22, 28, "tree", at="start", bold=True)
    for i, parent in enumerate(parents):
        if parent is not None:
            (x, y), (to_x, to_y) = places[parent], places[i]
            chosen = i in accepted
            ends = (x + width, y + top + height / 2), (to_x, to_y + top + height / 2)
            picture.line(*ends, colour=GREEN if chosen else LINE, width=2.5 if chosen else 1.3, arrow=False)
    for i, (x, y) in enumerate(places):
        fill, line = (PALE_BLUE, BLUE) if i == 0 else (PALE_GREEN, GREEN) if i in accepted else (PALE, LINE)
        picture.cell(x, y + top, width, height, f"{i}  {words[i]}", fill, line)
    picture.text(22, 184 + top + height + 18, "pending", BLUE, "start", 13)
    picture.text(22, 392, "The target's own tokens at nodes 0, 1 and 4 are those of nodes 1, 4", GREY, "start", 13)
    picture.text(22, 410, "and 8: three drafts are accepted, and its token at node 8 is added.", GREY, "start", 13)

    x0, y0, cell = 622, 62, 29
    picture.text(500, 28, "mask of the one pass over all nodes", at="start", bold=True)
    picture.text(x0 - 52, y0 - 8, "text", GREY, size=12)
    for i in range(len(words)):
        picture.text(x0 + cell * (i + 0.5), y0 - 8, str(i), GREY, size=12)
        picture.text(x0 - 88, y0 + cell * i + 20, f"{i}  {words[i]}", INK, "end", 13)
        picture.box(x0 - 80, y0 + cell * i, 56, cell, BLUE, "#ffffff", radius=0)
        seen, node = set(), i
        while node is not None:
            seen.add(node)
            node = parents[node]
        for j in range(len(words)):
            picture.box(x0 + cell * j, y0 + cell * i, cell, cell, BLUE if j in seen else PALE, "#ffffff", radius=0)
    picture.text(500, 362, "Each node sees the committed text, its ancestors and itself.", GREY, "start", 13)
    picture.text(500, 382, "Siblings have the same position. The keys and values of the", GREY, "start", 13)
    picture.text(500, 402, "accepted path are moved together afterwards.", GREY, "start", 13)
    return picture


def acceptance() -> Picture:
    """Draw the measured acceptance of the head that comes with jaxspec, by position."""
    picture = Picture(900, 380, "Acceptance by position, measured")
    left, bottom, high, group = 70, 300, 220, 200
    colours = (BLUE, GREEN, YELLOW)
    picture.text(24, 30, "Rounds in which the draft at this position was accepted", at="start", bold=True)
    subject = "SmolLM2-135M-Instruct with the head that comes with jaxspec, 64 held-out prompts; of the tree, by level"
    picture.text(24, 52, subject, GREY, "start", 13)
    for percent in range(0, 101, 25):
        y = bottom - high * percent / 100
        picture.line((left, y), (870, y), colour="#e5e7eb" if percent else GREY, width=1, arrow=False)
        picture.text(left - 8, y + 5, f"{percent} %", GREY, "end", 12)
    for i, (name, shares) in enumerate(ACCEPTANCE.items()):
        for position, share in enumerate(shares):
            x, tall = left + 22 + group * position + 54 * i, high * share / 100
            picture.box(x, bottom - tall, 48, tall, colours[i], "none", radius=2)
            picture.text(x + 24, bottom - tall - 6, str(share), size=12)
        picture.box(left + 22 + 210 * i, 352, 14, 14, colours[i], "none", radius=2)
        picture.text(left + 44 + 210 * i, 364, name, at="start", size=13)
    for position in range(4):
        picture.text(left + 22 + group * position + 78, bottom + 22, f"position {position + 1}", size=13)
    return picture


PICTURES = {"round": the_round, "pages": pages, "tree": tree, "acceptance": acceptance}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
