"""What `pagedweight top` draws: memory, bits layer by layer over time, moves and stalls."""

from __future__ import annotations

from collections import deque

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedweight.cli.heat import BESIDE, cells, legend
from pagedweight.cli.top_reading import Reading

MIB = 2**20
COLOURS = ("#1b6ca8", "#7fb2d9", "#e8862e", "grey50")
INKS = "#+=."  # where the terminal has no colour
MOST_ROWS = 24  # of the heat map: of more layers, neighbours share one


class View:
    """The last readings, and how they look on a console. They are kept as far as the heat map shows them."""

    def __init__(self, address: str, console: Console) -> None:
        self._address = address
        self._console = console
        self._readings: deque[Reading] = deque(maxlen=max(8, console.width - BESIDE))
        self._trouble = ""

    def add(self, reading: Reading | str) -> None:
        """A reading, or why there is none; the first must be one."""
        if isinstance(reading, str):
            self._trouble = reading
        else:
            self._readings.append(reading)
            self._trouble = ""

    def render(self) -> Group:
        """The whole screen."""
        parts = [self._head(), Panel(self._memory(), title="memory", title_align="left")]
        if self._readings[-1].layer_bits:
            parts.append(Panel(self._layers(), title="bits by layer, now at the right", title_align="left"))
        parts.append(Panel(self._moves(), title="moves", title_align="left"))
        return Group(*parts)

    def _head(self) -> Text:
        now = self._readings[-1]
        head = Text.assemble(
            ("pagedweight top ", "bold"),
            f"{self._address}  {now.mean_bits:.2f} mean bits, {now.running:.0f} requests running",
        )
        return head.append(f"  {self._trouble}", style="bold red") if self._trouble else head

    def _memory(self) -> Group:
        """One bar of all bytes, and a line with each part's."""
        memory = self._readings[-1].memory
        total, room = sum(memory.values()) or 1.0, self._console.width - 6
        bar, key = Text(), Text()
        for (name, held), colour, ink in zip(memory.items(), COLOURS, INKS, strict=True):
            wide = round(held / total * room)
            plain = self._console.color_system is None
            bar.append(ink * wide if plain else " " * wide, style="" if plain else f"on {colour}")
            key.append(f"{ink if plain else '■'} ", style="" if plain else colour)
            key.append(f"{name} {held / MIB:,.1f} MiB   ")
        return Group(bar, key)

    def _layers(self) -> Group:
        names = list(self._readings[-1].layer_bits)
        ends = self._ends()
        each = -(-len(names) // MOST_ROWS)
        lines = []
        for start in range(0, len(names), each):
            group = names[start : start + each]
            bits = [
                sum(r.layer_bits[n] for n in group) / len(group) for r in self._readings if group[0] in r.layer_bits
            ]
            label = group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}"
            line = Text(f"{label:>9} ")
            lines.append(line.append_text(cells(bits, ends, self._console, wide=1)).append(f" {bits[-1]:.2f}"))
        return Group(*lines, legend(ends, self._console))

    def _ends(self) -> tuple[float, float]:
        known = [float(bits) for bits in self._readings[-1].rows_at]
        if known:
            return min(known), max(known)
        seen = [bits for reading in self._readings for bits in reading.layer_bits.values()]
        return min(seen), max(seen)

    def _moves(self) -> Table:
        now = self._readings[-1]
        rates = now.rates(self._readings[-2]) if len(self._readings) > 1 else dict.fromkeys(now._fields, 0.0)
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(justify="right")
        table.add_row("", "since the start", "a second now")
        for name in ("lowered", "raised"):
            table.add_row(f"linear-blocks {name}", f"{getattr(now, name):,.0f}", f"{rates[name]:,.1f}")
        for name, size in (("released", "released_bytes"), ("loaded", "loaded_bytes")):
            table.add_row(f"{name}, MiB", f"{getattr(now, size) / MIB:,.1f}", f"{rates[size] / MIB:,.1f}")
        table.add_row("stalled, ms", f"{1e3 * now.stalled_seconds:,.1f}", f"{1e3 * rates['stalled_seconds']:,.1f}")
        table.add_row("requests answered", f"{now.answered:,.0f}", f"{rates['answered']:,.1f}")
        table.add_row("in flight, MiB", f"{now.in_flight_bytes / MIB:,.1f}", "")
        table.add_row("shortfall, MiB", f"{now.shortfall_bytes / MIB:,.1f}", "")
        return table
