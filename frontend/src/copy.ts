// Buttons that copy a command line; without the clipboard they stay hidden.
export function copyButtons(): void {
  if (navigator.clipboard === undefined) return;
  const show = (within: ParentNode): void => {
    for (const button of within.querySelectorAll<HTMLButtonElement>("[data-copy]")) button.hidden = false;
  };
  show(document);
  document.addEventListener("qmq:replaced", (event) => show((event as CustomEvent<Element>).detail));
  document.addEventListener("click", (event) => {
    const button = (event.target as Element).closest<HTMLButtonElement>("[data-copy]");
    if (button === null) return;
    void navigator.clipboard.writeText(button.dataset.copy ?? "").then(() => {
      button.classList.add("copied");
      setTimeout(() => button.classList.remove("copied"), 1000);
    });
  });
}
