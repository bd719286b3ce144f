import type { Schemas } from "@spoolhq/client";
import { useApprovals, type ApprovalDecision } from "@spoolhq/react";
import { useCallback, useEffect, useMemo, useRef, useState } from "react";
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

/** All requests that wait for a person. */
export function ApprovalsPage() {
  const { approvals, error, decide } = useApprovals();
  const { linkTo } = useParameters();
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
      {approvals.length === 0 && !error && (
        <p className="muted">
          No request waits. An agent asks here before a call that its <Term name="permissions" /> leave to a person.
        </p>
      )}
      <ApprovalList approvals={approvals} decide={decide} />
    </section>
  );
}

type Decide = ReturnType<typeof useApprovals>["decide"];

/** Requests, the oldest first. One that ends stays in its place, so that no other request moves under the pointer. */
export function ApprovalList({ approvals, decide }: { approvals: readonly Approval[]; decide: Decide }) {
  const [limit, setLimit] = useState(pageSize);
  const [removals, setRemovals] = useState(0);
  // The function to decide is another one after a sign-in, perhaps to another tenant.
  const seen = useMemo(() => new Map<string, Approval>(), [decide, removals]);
  const open = new Set<string>();
  for (const approval of approvals) {
    if (approval.status !== "pending") continue;
    open.add(approval.approvalId!);
    seen.set(approval.approvalId!, approval);
  }
  const sorted = [...seen.values()].sort((a, b) => (a.requestedAt ?? "").localeCompare(b.requestedAt ?? ""));
  const rest = sorted.length - limit;
  return (
    <>
      {sorted.length > open.size && (
        <div>
          <button className="button" onClick={() => setRemovals(removals + 1)}>
            Remove {sorted.length - open.size} ended
          </button>
        </div>
      )}
      <ul className="approvals-list">
        {sorted.slice(0, limit).map((approval) => (
          <Item key={approval.approvalId} approval={approval} isOpen={open.has(approval.approvalId!)} decide={decide} />
        ))}
      </ul>
      {rest > 0 && (
        <button className="button" onClick={() => setLimit(limit + pageSize)}>
          Show {Math.min(pageSize, rest)} of {rest} more
        </button>
      )}
    </>
  );
}

function Item({ approval, isOpen, decide }: { approval: Approval; isOpen: boolean; decide: Decide }) {
  const { linkTo } = useParameters();
  const onDecide = useCallback((decision: ApprovalDecision) => decide(approval.approvalId!, decision), [decide, approval.approvalId]);
  return (
    <li className="approvals-item">
      <p className="approvals-session muted">
        <Link href={linkTo(`/sessions/${approval.sessionId}`)}>Open the session</Link> · {isOpen ? <Time at={approval.requestedAt} /> : "no longer open"}
      </p>
      <div inert={!isOpen}>
        <ApprovalCard approval={approval} onDecide={onDecide} />
      </div>
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
    const added = approvals.filter(({ approvalId }) => !known.current.has(approvalId!));
    known.current = new Set(approvals.map(({ approvalId }) => approvalId!));
    const isAllowed = "Notification" in window && Notification.permission === "granted";
    if (!isAllowed || !document.hidden || added.length === 0) return;
    if (added.length === 1) notify("An agent asks for approval", visible(added[0]!.title ?? ""), added[0]!.approvalId!);
    else notify("Spool", `${added.length} requests wait for approval`, "approvals");
  }, [approvals]);
}

function notify(title: string, body: string, tag: string): void {
  try {
    new Notification(title, { body, tag });
  } catch {
    // Browsers of phones have no constructor of notifications; the title of the tab has the number.
  }
}
