import { useEffect, useRef } from "react";
import "./help.css";

const keys: [string, string][] = [
  ["j  k", "next and previous row of the conversation"],
  ["↑  ↓", "next and previous session, in the list"],
  ["Enter", "open or close a row"],
  ["e  E", "fold this row, all rows"],
  [".", "next error"],
  ["a", "next approval"],
  ["l", "follow the end"],
  ["G", "go to the end"],
  ["/", "search sessions"],
  ["Esc", "close the panel"],
  ["?", "this help"],
];

/** Reports whether keys belong to the element: a field, a control that uses letters, or a dialog, which Esc closes. */
export function takesKeys(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest("input, textarea, select, [contenteditable], dialog") !== null;
}

/** The keys of the whole page: search, help and closing the panel. */
export function useKeys({ onEscape, onHelp }: { onEscape: () => void; onHelp: () => void }): void {
  const latest = useRef({ onEscape, onHelp });
  latest.current = { onEscape, onHelp };
  useEffect(() => {
    const onKeyDown = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || takesKeys(event.target)) return;
      if (event.key === "?") latest.current.onHelp();
      else if (event.key === "Escape") latest.current.onEscape();
      else if (event.key === "/") document.getElementById("sessions-search")?.focus();
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", onKeyDown);
    return () => window.removeEventListener("keydown", onKeyDown);
  }, []);
}

/** The list of keys. */
export function Help({ isOpen, onClose }: { isOpen: boolean; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (isOpen) dialog.current?.showModal();
    else dialog.current?.close();
  }, [isOpen]);
  return (
    <dialog ref={dialog} className="help" aria-labelledby="help-title" onClose={onClose}>
      <h1 id="help-title">Keys</h1>
      <dl className="help-keys">
        {keys.map(([key, meaning]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
      <p className="muted">Keys do nothing while a field has the focus.</p>
      <form method="dialog">
        <button className="button" autoFocus>
          Close
        </button>
      </form>
    </dialog>
  );
}
