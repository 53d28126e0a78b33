// The ring of a route: a click on the latest version chooses the boundary of a split, and fills the form of the plan.
// The form does the same by the keyboard.
export function rings(): void {
  document.addEventListener("click", (event) => {
    const arc = (event.target as Element).closest<SVGPathElement>("[data-ring] [data-partition]");
    const ring = arc?.closest<SVGSVGElement>("[data-ring]");
    if (arc == null || ring == null) return;
    const at = boundary(ring, event);
    fill("verb", "split");
    fill("partitions", arc.dataset.partition ?? "");
    fill("at", String(at));
    fill("parts", "");
    const told = ring.parentElement?.querySelector("[data-ring-at]");
    if (told != null) told.textContent = `${arc.dataset.partition ?? ""} @ ${at}`;
    document.querySelector<HTMLElement>("#plan")?.parentElement?.querySelector<HTMLElement>("button")?.focus();
  });
}

// Which logical partition lies where somebody clicked: from the top, clockwise.
function boundary(ring: SVGSVGElement, event: MouseEvent): number {
  const box = ring.getBoundingClientRect();
  const x = event.clientX - box.left - box.width / 2;
  const y = event.clientY - box.top - box.height / 2;
  const turn = (Math.atan2(x, -y) / (2 * Math.PI) + 1) % 1;
  return Math.round(turn * Number(ring.dataset.ring));
}

function fill(name: string, value: string): void {
  const field = document.querySelector<HTMLInputElement | HTMLSelectElement>(`form[action="#plan"] [name="${name}"]`);
  if (field !== null) field.value = value;
}
