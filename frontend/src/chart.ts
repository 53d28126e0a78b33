// Curves: elements with data-chart (where the columns are), data-series (which of them) and data-labels.
import uPlot from "uplot";

const EVERY_MS = 3000;
const HEIGHT = 160;
/** What a time takes, such as 12:30:05, with room beside it. */
const TIME_PX = 80;
const DAY = "\n{YYYY}-{MM}-{DD}";
// From which distance of ticks on: what stands at a tick, and below it where a year, a day or a minute begins.
const TIMES: uPlot.Axis.Values = [
  [86400 * 365, "{YYYY}", null, null, null, null, null, null, 1],
  [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
  [60, "{HH}:{mm}", DAY, null, DAY, null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", DAY, null, DAY, null, null, null, 1],
  [0.001, ":{ss}.{fff}", DAY + " {HH}:{mm}", null, DAY + " {HH}:{mm}", null, "\n{HH}:{mm}", null, 1],
];

type Columns = { time_s: number[] } & Record<string, number[]>;

export function drawCharts(): void {
  const byUrl = new Map<string, HTMLElement[]>();
  for (const place of document.querySelectorAll<HTMLElement>("[data-chart]")) {
    const url = place.dataset.chart ?? "";
    byUrl.set(url, [...(byUrl.get(url) ?? []), place]);
  }
  for (const [url, places] of byUrl) follow(url, places.map((place) => new Curve(place)));
}

function follow(url: string, curves: Curve[]): void {
  const look = async (): Promise<void> => {
    if (document.hidden) return;
    try {
      const answer = await fetch(url);
      if (!answer.ok) return;
      const columns = (await answer.json()) as Columns;
      for (const curve of curves) curve.show(columns);
    } catch {
      // live.ts says that the console does not answer
    }
  };
  void look();
  setInterval(look, EVERY_MS);
}

class Curve {
  private readonly names: string[];
  private readonly labels: string[];
  private plot: uPlot | null = null;

  constructor(private readonly place: HTMLElement) {
    this.names = (place.dataset.series ?? "").split(",");
    this.labels = (place.dataset.labels ?? "").split(",");
    new ResizeObserver(() => this.plot?.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
  }

  show(columns: Columns): void {
    const data = [columns.time_s, ...this.names.map((name) => columns[name] ?? [])] as uPlot.AlignedData;
    if (this.plot !== null) this.plot.setData(data);
    else if (columns.time_s.length > 1) this.plot = new uPlot(this.options(), data, this.place);
  }

  private options(): uPlot.Options {
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string): string => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const series = this.names.map((_, at) => ({
      label: this.labels[at] ?? "",
      stroke: colour(at === 0 ? "--curve-1" : "--curve-2"),
      width: 2,
      scale: this.names[at]?.endsWith("_s") ? "seconds" : "y",
      points: { show: false },
    }));
    const right = this.names.some((name) => name.endsWith("_s")) ? [{ ...axis, scale: "seconds", side: 1 as const, grid: { show: false } }] : [];
    return {
      width: this.place.clientWidth,
      height: HEIGHT,
      series: [{}, ...series],
      axes: [{ ...axis, values: TIMES, space: TIME_PX }, { ...axis, size: 60 }, ...right],
      scales: { y: { range: fromZero }, seconds: { range: fromZero } },
      legend: { live: false },
      cursor: { drag: { x: false, y: false } },
    };
  }
}

function fromZero(_: uPlot, least: number | null, most: number | null): [number, number] {
  return [Math.min(0, least ?? 0), Math.max(1, (most ?? 0) * 1.1)];
}
