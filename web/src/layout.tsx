import { useRef, useState, type KeyboardEvent, type PointerEvent, type ReactNode } from "react";
import { readSetting, writeSetting } from "./settings";
import "./layout.css";

const columns = {
  sessions: { initial: 280, least: 200, most: 480, label: "Width of the list of sessions" },
  panel: { initial: 360, least: 280, most: 720, label: "Width of the panel" },
};
const keyStep = 16;

interface LayoutProps {
  /** Above everything. */
  notice?: ReactNode;
  sessions: ReactNode;
  children: ReactNode;
  panel?: ReactNode;
  /** What a narrow window shows: the list, or what was opened. */
  narrow: "sessions" | "main";
  /** Whether the panel is open in a window that has no column for it. */
  drawerOpen: boolean;
  onDrawerClose: () => void;
}

/** The columns of the page. A window without room for three has the panel in a drawer; a narrow one shows one column. */
export function Layout({ notice, sessions, children, panel, narrow, drawerOpen, onDrawerClose }: LayoutProps) {
  const [left, setLeft] = useWidth("sessions");
  const [right, setRight] = useWidth("panel");
  return (
    <div className={`layout layout-narrow-${narrow} ${panel ? "layout-with-panel" : ""}`} style={{ "--layout-sessions": `${left}px`, "--layout-panel": `${right}px` } as React.CSSProperties}>
      {notice && <div className="layout-notice">{notice}</div>}
      <nav className="layout-sessions" aria-label="Sessions">
        {sessions}
      </nav>
      <Divider column="sessions" width={left} onWidth={setLeft} />
      <main className="layout-main">{children}</main>
      {panel && (
        <>
          <Divider column="panel" width={right} onWidth={setRight} />
          {drawerOpen && <button className="layout-drawer-back" aria-label="Close the panel" tabIndex={-1} onClick={onDrawerClose} />}
          <aside className={`layout-panel ${drawerOpen ? "layout-panel-open" : ""}`} aria-label="Details">
            {panel}
          </aside>
        </>
      )}
    </div>
  );
}

function useWidth(column: keyof typeof columns): [number, (width: number) => void] {
  const { initial, least, most } = columns[column];
  const clamp = (width: number) => Math.min(most, Math.max(least, Math.round(width)));
  const [width, setWidth] = useState(() => clamp(Number(readSetting(`width.${column}`)) || initial));
  const change = (next: number) => {
    setWidth(clamp(next));
    writeSetting(`width.${column}`, String(clamp(next)));
  };
  return [width, change];
}

/** The line between two columns: it is dragged, or moved with the arrow keys. */
function Divider({ column, width, onWidth }: { column: keyof typeof columns; width: number; onWidth: (width: number) => void }) {
  const { initial, least, most, label } = columns[column];
  const sign = column === "sessions" ? 1 : -1;
  const drag = useRef<{ x: number; width: number }>(undefined);
  const onPointerDown = (event: PointerEvent) => {
    drag.current = { x: event.clientX, width };
    event.currentTarget.setPointerCapture(event.pointerId);
  };
  const onPointerMove = (event: PointerEvent) => {
    if (drag.current) onWidth(drag.current.width + sign * (event.clientX - drag.current.x));
  };
  const onPointerEnd = () => (drag.current = undefined);
  const onKeyDown = (event: KeyboardEvent) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (direction === undefined) return;
    event.preventDefault();
    onWidth(width + sign * direction * keyStep);
  };
  return (
    <div
      className={`layout-divider layout-divider-${column}`}
      role="separator"
      aria-orientation="vertical"
      aria-label={label}
      aria-valuenow={width}
      aria-valuemin={least}
      aria-valuemax={most}
      tabIndex={0}
      onPointerDown={onPointerDown}
      onPointerMove={onPointerMove}
      onPointerUp={onPointerEnd}
      onPointerCancel={onPointerEnd}
      onKeyDown={onKeyDown}
      onDoubleClick={() => onWidth(initial)}
    />
  );
}
