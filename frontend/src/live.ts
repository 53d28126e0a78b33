// Parts of a page that are read again while somebody looks: elements with data-live and an id.
//
// The page itself is asked for again, so that there is one way to draw it. A part that holds the focus, an open detail or a selection is
// left alone. A hidden page asks for nothing.
const EVERY_MS = 3000;

export function keepLive(): void {
  if (document.querySelector("[data-live]") === null) return;
  let underWay = false;
  const look = async (): Promise<void> => {
    if (document.hidden || underWay) return;
    underWay = true;
    try {
      const answer = await fetch(location.href, { headers: { "x-live": "1" } });
      if (answer.redirected) location.reload();
      replaceParts(new DOMParser().parseFromString(await answer.text(), "text/html"));
      tellStale(false);
    } catch {
      tellStale(true);
    } finally {
      underWay = false;
    }
  };
  const next = (): void => {
    void look().finally(() => setTimeout(next, everyMs()));
  };
  setTimeout(next, everyMs());
  document.addEventListener("visibilitychange", look);
}

// What changes fast is asked for more often: an element with data-every says so.
function everyMs(): number {
  return Number(document.querySelector<HTMLElement>("[data-live] [data-every]")?.dataset.every ?? EVERY_MS);
}

function replaceParts(fresh: Document): void {
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.getElementById(part.id);
    if (other === null || other.innerHTML === part.innerHTML || isInUse(part)) continue;
    part.replaceChildren(...other.childNodes);
    document.dispatchEvent(new CustomEvent("qmq:replaced", { detail: part }));
  }
}

function isInUse(part: Element): boolean {
  const selection = getSelection();
  const isSelected = selection !== null && !selection.isCollapsed && selection.containsNode(part, true);
  return part.contains(document.activeElement) || part.querySelector("details[open]") !== null || isSelected;
}

function tellStale(isStale: boolean): void {
  const shown = document.getElementById("stale");
  if (!isStale) shown?.remove();
  if (!isStale || shown !== null) return;
  const note = document.createElement("p");
  note.id = "stale";
  note.className = "failure";
  note.setAttribute("role", "alert");
  note.textContent = document.body.dataset.stale ?? "";
  document.getElementById("main")?.prepend(note);
}
