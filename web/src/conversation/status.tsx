/** What has become of a row, as a shape and a word. */
export type Status = "running" | "waiting" | "done" | "failed" | "cancelled";

const shapes: Record<Status, string> = { running: "●", waiting: "◐", done: "✓", failed: "✕", cancelled: "⊘" };

/** The mark of a status. The word is for screen readers and the tooltip. */
export function StatusMark({ status, word = status }: { status: Status; word?: string }) {
  return (
    <span className={`status-mark status-mark-${status}`} title={word}>
      <span aria-hidden="true">{shapes[status]}</span>
      <span className="visually-hidden">{word}</span>
    </span>
  );
}
