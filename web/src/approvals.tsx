import type { Schemas } from "@spoolhq/client";
import { useApprovals, type ApprovalDecision } from "@spoolhq/react";
import { useCallback, useEffect, useRef, useState } from "react";
import { Link } from "wouter";
import { ApprovalCard } from "./conversation";
import { ErrorNote } from "./error";
import { useParameters } from "./location";
import { Term } from "./term";
import { visible } from "./text";
import { Time } from "./time";
import "./approvals.css";

type Approval = Schemas["spool.v1.Approval"];

const pageSize = 50;

/** All requests that wait for a person, the oldest first. */
export function ApprovalsPage() {
  const { approvals, error, decide } = useApprovals();
  const { linkTo } = useParameters();
  const [shown, setShown] = useState(pageSize);
  const sorted = [...approvals].sort((a, b) => (a.requestedAt ?? "").localeCompare(b.requestedAt ?? ""));
  return (
    <section className="approvals" aria-label="Approvals">
      <header className="approvals-head">
        <Link href={linkTo("/")} className="button button-quiet layout-only-narrow" aria-label="Back to the sessions">
          ‹
        </Link>
        <h1>Approvals</h1>
        <NotificationButton />
      </header>
      {error && <ErrorNote error={error} />}
      {sorted.length === 0 && !error && (
        <p className="muted">
          No request waits. An agent asks here before a call that its <Term name="permissions" /> leave to a person.
        </p>
      )}
      <ul className="approvals-list">
        {sorted.slice(0, shown).map((approval) => (
          <Item key={approval.approvalId} approval={approval} decide={decide} />
        ))}
      </ul>
      {sorted.length > shown && (
        <button className="button" onClick={() => setShown(shown + pageSize)}>
          Show {Math.min(pageSize, sorted.length - shown)} of {sorted.length - shown} more
        </button>
      )}
    </section>
  );
}

function Item({ approval, decide }: { approval: Approval; decide: ReturnType<typeof useApprovals>["decide"] }) {
  const { linkTo } = useParameters();
  const onDecide = useCallback((decision: ApprovalDecision) => decide(approval.approvalId!, decision), [decide, approval.approvalId]);
  return (
    <li className="approvals-item">
      <p className="approvals-session muted">
        <Link href={linkTo(`/sessions/${approval.sessionId}`)}>Open the session</Link> · <Time at={approval.requestedAt} />
      </p>
      <ApprovalCard approval={approval} onDecide={onDecide} />
    </li>
  );
}

/** Allows notifications of new requests. The browser asks only after this click. */
function NotificationButton() {
  const [permission, setPermission] = useState(() => ("Notification" in window ? Notification.permission : "denied"));
  if (permission !== "default") return null;
  return (
    <button className="button" onClick={async () => setPermission(await Notification.requestPermission())}>
      Notify me of new requests
    </button>
  );
}

/** Shows the number of open requests in the title of the tab, and notifies of new ones while the page is not seen. */
export function useApprovalNotices(approvals: readonly Approval[]): void {
  const count = approvals.length;
  useEffect(() => {
    document.title = count > 0 ? `(${count}) Spool` : "Spool";
  }, [count]);

  const known = useRef(new Set<string>());
  useEffect(() => {
    const isAllowed = "Notification" in window && Notification.permission === "granted";
    for (const { approvalId: id, title } of approvals) {
      if (known.current.has(id!)) continue;
      known.current.add(id!);
      if (isAllowed && document.hidden) new Notification("An agent asks for approval", { body: visible(title ?? ""), tag: id! });
    }
  }, [approvals]);
}
