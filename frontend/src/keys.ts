// The keyboard: "g" and a screen's letter, "/" for the search, "?" for help. Nothing while somebody types.
const SECOND_KEY_MS = 1000;

export function keyboard(): void {
  let wasG = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (Date.now() - wasG < SECOND_KEY_MS) {
      wasG = 0;
      document.querySelector<HTMLAnchorElement>(`a[data-key="${CSS.escape(event.key)}"]`)?.click();
    } else if (event.key === "g") {
      wasG = Date.now();
    } else if (event.key === "/") {
      const search = document.querySelector<HTMLInputElement>("[data-search]");
      if (search === null) return;
      event.preventDefault();
      search.focus();
    } else if (event.key === "?") {
      document.querySelector<HTMLDialogElement>("#help")?.showModal();
    }
  });
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLInputElement || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
}
