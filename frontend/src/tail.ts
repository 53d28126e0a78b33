// Messages of a subject as they come: elements with data-tail (where the events are). A hidden page stops.
const ROWS_MAX = 200;

interface Told {
  id: string;
  time: string;
  place: string;
  key: string;
  form: string;
  body: string;
}

export function tails(): void {
  for (const box of document.querySelectorAll<HTMLElement>("[data-tail]")) new Tail(box);
}

class Tail {
  private source: EventSource | null = null;
  private readonly start: HTMLButtonElement;
  private readonly stop: HTMLButtonElement;
  private readonly state: HTMLElement;
  private readonly list: HTMLElement;

  constructor(private readonly box: HTMLElement) {
    this.start = box.querySelector("[data-tail-start]")!;
    this.stop = box.querySelector("[data-tail-stop]")!;
    this.state = box.querySelector("[data-tail-state]")!;
    this.list = box.querySelector("[data-tail-list]")!;
    this.start.addEventListener("click", () => this.open());
    this.stop.addEventListener("click", () => this.close());
    document.addEventListener("visibilitychange", () => document.hidden && this.close());
    addEventListener("pagehide", () => this.close());
  }

  private open(): void {
    this.close();
    this.list.replaceChildren();
    this.source = new EventSource(this.box.dataset.tail ?? "");
    this.source.addEventListener("message", (each) => this.show(JSON.parse(each.data) as Told));
    this.source.addEventListener("pace", (each) => {
      const { skipped } = JSON.parse(each.data) as { skipped: number };
      this.state.textContent = (this.box.dataset.skipped ?? "").replace("{skipped}", skipped.toLocaleString());
    });
    this.source.addEventListener("failure", (each) => {
      this.close();
      this.state.textContent = (JSON.parse(each.data) as { text: string }).text;
    });
    this.start.hidden = true;
    this.stop.hidden = false;
    this.stop.focus();
  }

  private close(): void {
    this.source?.close();
    this.source = null;
    this.start.hidden = false;
    this.stop.hidden = true;
    this.state.textContent = "";
  }

  private show(told: Told): void {
    const row = document.createElement("li");
    for (const [name, text] of Object.entries({ when: told.time, place: told.place, key: told.key, line: told.body })) {
      const part = document.createElement("span");
      part.className = name;
      part.textContent = text;
      row.append(part, " ");
    }
    this.list.prepend(row);
    while (this.list.childElementCount > ROWS_MAX) this.list.lastElementChild?.remove();
  }
}
