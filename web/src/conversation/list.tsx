import { defaultRangeExtractor, useVirtualizer } from "@tanstack/react-virtual";
import type { Block } from "@spoolhq/client";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState, type ReactNode } from "react";
import type { Approval } from "./approval";
import { count } from "./format";
import { isEnded, isFailure, rowsOf, type Row, type Subagent, type Turn } from "./rows";
import { opensByItself, RowView, type RowActions } from "./rowview";
import { summarize } from "./tools";
import { takesKeys } from "../help";
import { Boundary } from "../boundary";
import { visible } from "../text";
import { transcriptMarkdown } from "./transcript";

/** Rows of the last turn that are laid out by the browser and not by the virtual list. More of them move into the list in steps. */
const tailRows = 40;
const tailStep = 20;
/** Height of the line above the first row, in pixels. It is always there, so that nothing moves when older blocks arrive. */
const headHeight = 40;
/** Distance from the top, in pixels, at which older blocks are loaded. */
const loadDistance = 1200;

export interface ConversationListProps {
  blocks: readonly Block[];
  streamingBlockIds: ReadonlySet<string>;
  truncatedBlockIds: ReadonlySet<string>;
  keyOf: (block: Block) => string;
  subagents: ReadonlyMap<string, Subagent>;
  turns: ReadonlyMap<string, Turn>;
  /** The requests to show, open and decided, in the order of their requests. */
  approvals: readonly Approval[];
  renderApproval: (approval: Approval) => ReactNode;
  hasOlder: boolean;
  isLoading: boolean;
  /** Loads the page before the first block. Resolves when it is there, or when it could not be loaded. */
  loadOlder: () => Promise<unknown>;
  /** A block to scroll to and to mark. */
  atBlockId?: string;
  copyLink?: RowActions["copyLink"];
  showEvent?: RowActions["showEvent"];
  /** Saves the whole conversation as a file. */
  download?: () => void;
  loadWhole: RowActions["loadWhole"];
}

/**
 * The scrolling list of a conversation. It follows its end until the person scrolls up. Rows are flat: those of earlier turns are
 * in a virtual list, those of the last turn below it.
 */
export function ConversationList(props: ConversationListProps) {
  const { blocks, turns, hasOlder, isLoading, loadOlder, loadWhole, copyLink, showEvent, truncatedBlockIds, keyOf } = props;
  const [opened, setOpened] = useState<ReadonlyMap<string, boolean>>(new Map());
  const [current, setCurrent] = useState<string>();
  const scroller = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);

  const ranBefore = useRef(new Set<string>());
  const rows = useMemo(
    () =>
      rowsOf({
        blocks,
        streamingBlockIds: props.streamingBlockIds,
        truncatedBlockIds,
        keyOf,
        subagents: props.subagents,
        turns,
        approvals: props.approvals,
        // A sub-agent that was seen at work stays open when it ends: its rows do not vanish under the reader.
        isOpen: ({ key, subagent }) => {
          if (subagent?.status === "running") ranBefore.current.add(key);
          return opened.get(key) ?? ranBefore.current.has(key);
        },
      }),
    [blocks, props.streamingBlockIds, truncatedBlockIds, keyOf, props.subagents, turns, props.approvals, opened],
  );
  const isOpen = (row: Row) => opened.get(row.key) ?? opensByItself(row);

  const latestBlocks = useRef(blocks);
  latestBlocks.current = blocks;
  const follow = useFollow(scroller, content);
  const actions = useMemo<RowActions>(
    () => ({
      toggle: (key, open) => {
        if (open) follow.stop();
        setOpened((before) => new Map(before).set(key, open));
      },
      turnMarkdown: (executionId) => transcriptMarkdown(latestBlocks.current.filter((block) => block.executionId === executionId)),
      loadWhole,
      ...(copyLink ? { copyLink } : {}),
      ...(showEvent ? { showEvent } : {}),
    }),
    [follow.stop, loadWhole, copyLink, showEvent],
  );

  const boundary = tailStart(rows);
  const heights = useHeights();
  const currentIndex = current === undefined ? -1 : rows.findIndex((row) => row.key === current);
  const virtualizer = useVirtualizer({
    count: boundary,
    getScrollElement: () => scroller.current,
    getItemKey: (i) => rows[i]!.key,
    estimateSize: (i) => heights.get(rows[i]!.key) ?? estimateHeight(rows[i]!),
    overscan: 8,
    scrollMargin: headHeight,
    anchorTo: "end",
    scrollEndThreshold: -1, // the end of the virtual list is not the end of the conversation
    // The row with the focus stays mounted, and so do open requests, with the comments that are being written.
    rangeExtractor: (range) => {
      const kept = [currentIndex, ...openRequests(rows, boundary)].filter((i) => i >= 0 && i < boundary);
      return [...new Set([...defaultRangeExtractor(range), ...kept])].sort((a, b) => a - b);
    },
  });

  useLayoutEffect(follow.stick);
  useKeepPosition(scroller, content, boundary === 0, rows[0]?.key, follow.isFollowing);

  const older = useOlder(blocks[0]?.id, hasOlder && !isLoading, loadOlder);
  const loadIfNear = () => {
    if (scroller.current && scroller.current.scrollTop < loadDistance) older.loadOnce();
  };
  useEffect(loadIfNear);

  const goTo = useCallback(
    (row: Row, index: number, align: "auto" | "center") => {
      setCurrent(row.key);
      if (index < boundary) virtualizer.scrollToIndex(index, { align });
      else elementOf(content.current, row.key)?.scrollIntoView({ block: align === "center" ? "center" : "nearest" });
    },
    [boundary, virtualizer],
  );
  useFocusOf(content, current);
  useJumpTo(props.atBlockId, rows, older.loadOnce, (row, index) => {
    follow.stop();
    goTo(row, index, "center");
  });

  useKeys({
    step: (by) => {
      const index = Math.min(rows.length - 1, Math.max(0, currentIndex < 0 ? (by > 0 ? 0 : rows.length - 1) : currentIndex + by));
      if (rows[index]) {
        if (by < 0) follow.stop();
        goTo(rows[index], index, "auto");
      }
    },
    next: (matches) => {
      for (let i = 1; i <= rows.length; i++) {
        const index = (currentIndex + i + rows.length) % rows.length;
        if (matches(rows[index]!)) {
          follow.stop();
          return goTo(rows[index]!, index, "center");
        }
      }
    },
    toggle: () => {
      const row = rows[currentIndex];
      if (row && folds(row)) actions.toggle(row.key, !isOpen(row));
    },
    toggleAll: () => {
      const open = !rows.some((row) => folds(row) && isOpen(row));
      follow.stop();
      setOpened(new Map(rows.filter(folds).map((row) => [row.key, open])));
    },
    end: follow.start,
  });

  const renderRow = (row: Row, index: number) => {
    const approval = row.type === "approval" ? props.renderApproval(row.approval) : <RowView row={row} open={isOpen(row)} ended={isEnded(turns.get(row.executionId ?? ""))} actions={actions} />;
    return (
      <article
        className={`row row-${row.type}${row.key === current ? " row-current" : ""}`}
        style={row.depth > 0 ? { marginInlineStart: `calc(var(--space-4) * ${Math.min(row.depth, 6)})` } : undefined}
        tabIndex={-1}
        data-row={row.key}
        data-depth={row.depth || undefined}
        aria-posinset={index + 1}
        aria-setsize={hasOlder ? -1 : rows.length}
        aria-current={row.key === current || undefined}
      >
        <Boundary>{approval}</Boundary>
      </article>
    );
  };
  const newRows = follow.leftAt === undefined ? 0 : rows.length - 1 - rows.findLastIndex((row) => row.key === follow.leftAt);

  return (
    <div className="conversation">
      <div
        className="conversation-scroller"
        ref={scroller}
        role="log"
        aria-live="off"
        aria-label="Conversation"
        tabIndex={0}
        onScroll={() => {
          follow.onScroll(rows.at(-1)?.key);
          loadIfNear();
        }}
      >
        <div className="conversation-content" ref={content}>
          <div className="conversation-head" style={{ height: headHeight }}>
            {hasOlder ? (
              <button type="button" className="conversation-older" onClick={older.load} disabled={isLoading || older.isLoading}>
                {isLoading || older.isLoading ? "Loading…" : "Load older"}
              </button>
            ) : (
              rows.length > 0 && <span>Beginning of the session</span>
            )}
            {props.download && rows.length > 0 && (
              <button type="button" className="conversation-older" onClick={props.download}>
                Download transcript
              </button>
            )}
          </div>
          <div className="conversation-virtual" style={{ height: virtualizer.getTotalSize() }}>
            {virtualizer.getVirtualItems().map((item) => (
              <div key={item.key} data-index={item.index} ref={virtualizer.measureElement} className="conversation-item" style={{ transform: `translateY(${item.start - headHeight}px)` }}>
                {renderRow(rows[item.index]!, item.index)}
              </div>
            ))}
          </div>
          {rows.slice(boundary).map((row, i) => (
            <div key={row.key} ref={heights.observe} data-height-of={row.key} className="conversation-tail-item">
              {renderRow(row, boundary + i)}
            </div>
          ))}
        </div>
      </div>
      {!follow.isFollowing && (
        <button type="button" className="conversation-to-end" onClick={follow.start}>
          ↓ To the end{newRows > 0 && ` · ${count(newRows, "new block")}`}
        </button>
      )}
      <Announcements rows={rows} />
    </div>
  );
}

/** Returns the index of the first row that is below the virtual list: rows of the last turn, and not too many of them. */
function tailStart(rows: readonly Row[]): number {
  const last = rows.at(-1)?.executionId;
  let start = rows.length;
  while (start > 0 && rows[start - 1]!.executionId === last) start--;
  const surplus = rows.length - start - tailRows;
  return surplus > 0 ? start + Math.ceil(surplus / tailStep) * tailStep : start;
}

/** Returns the indexes of the last open requests in the virtual list. */
function openRequests(rows: readonly Row[], boundary: number): number[] {
  const indexes: number[] = [];
  for (let i = boundary - 1; i >= 0 && indexes.length < 20; i--) {
    const row = rows[i]!;
    if (row.type === "approval" && row.approval.status === "pending") indexes.push(i);
  }
  return indexes;
}

/** Returns the height of a row that was never laid out, in pixels: wrong heights are corrected without moving what is seen. */
function estimateHeight(row: Row): number {
  if (row.type !== "block") return row.type === "approval" ? 240 : row.type === "turn" ? 44 : 30;
  const { block } = row;
  if (block.kind === "thinking" || block.kind === "system") return 30;
  if (block.kind !== "assistant_text" && block.kind !== "user_message") return 80;
  return 36 + 21 * Math.min(400, Math.ceil((block.content?.length ?? 0) / 90));
}

/** Reports whether a row can be opened and closed. */
function folds(row: Row): boolean {
  return row.type === "tool" || row.type === "result" || row.type === "subagent" || (row.type === "block" && /^(thinking|step|skill_load)$/.test(row.block.kind));
}

function elementOf(content: HTMLElement | null, key: string): HTMLElement | null {
  return content?.querySelector<HTMLElement>(`[data-row="${CSS.escape(key)}"]`) ?? null;
}

function distanceFromEnd(element: HTMLElement): number {
  return element.scrollHeight - element.clientHeight - element.scrollTop;
}

/** Keeps the list at its end until the person scrolls up, and again once they are back at the end. */
function useFollow(scroller: React.RefObject<HTMLDivElement | null>, content: React.RefObject<HTMLDivElement | null>) {
  const [state, setState] = useState<{ isFollowing: boolean; leftAt?: string }>({ isFollowing: true });
  const following = useRef(true);
  const lastTop = useRef(0);
  const set = useCallback((isFollowing: boolean, leftAt?: string) => {
    if (following.current === isFollowing) return;
    following.current = isFollowing;
    setState({ isFollowing, ...(leftAt ? { leftAt } : {}) });
  }, []);
  const stick = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    if (following.current) {
      element.scrollTop = element.scrollHeight;
      lastTop.current = element.scrollTop;
    } else if (distanceFromEnd(element) <= 2) set(true); // what was opened is closed again, or fits
  }, [scroller, set]);
  useEffect(() => {
    // Images, fonts and opened rows change the height without a render of the list.
    const observer = new ResizeObserver(stick);
    if (content.current) observer.observe(content.current);
    if (scroller.current) observer.observe(scroller.current);
    return () => observer.disconnect();
  }, [stick, content, scroller]);
  const start = useCallback(() => {
    set(true);
    stick();
  }, [set, stick]);
  const stop = useCallback(() => set(false), [set]);
  const onScroll = useCallback(
    (lastKey: string | undefined) => {
      const element = scroller.current!;
      if (distanceFromEnd(element) <= 2) set(true);
      else if (element.scrollTop < lastTop.current - 1) set(false, lastKey);
      lastTop.current = element.scrollTop;
    },
    [scroller, set],
  );
  return { ...state, stick, start, stop, onScroll };
}

/** The heights of rows below the virtual list, so that the list knows them when the rows move into it. */
function useHeights() {
  const heights = useRef(new Map<string, number>());
  const observer = useRef<ResizeObserver>(undefined);
  const observe = useCallback((element: HTMLElement | null) => {
    if (!element) return;
    observer.current ??= new ResizeObserver((entries) => {
      for (const { target } of entries) heights.current.set((target as HTMLElement).dataset["heightOf"]!, (target as HTMLElement).offsetHeight);
    });
    observer.current.observe(element);
    return () => observer.current?.unobserve(element);
  }, []);
  return { observe, get: (key: string) => heights.current.get(key) };
}

/** Keeps what is seen in its place when older blocks arrive above an empty virtual list, which had no row to hold on to. */
function useKeepPosition(scroller: React.RefObject<HTMLDivElement | null>, content: React.RefObject<HTMLDivElement | null>, isEmpty: boolean, firstKey: string | undefined, isFollowing: boolean): void {
  const before = useRef<{ isEmpty: boolean; firstKey: string | undefined }>(undefined);
  useLayoutEffect(() => {
    const { current } = before;
    before.current = { isEmpty, firstKey };
    if (!current?.isEmpty || current.firstKey === undefined || current.firstKey === firstKey || isFollowing) return;
    const first = elementOf(content.current, current.firstKey);
    if (first) scroller.current!.scrollTop += first.getBoundingClientRect().top - content.current!.getBoundingClientRect().top - headHeight;
  }, [scroller, content, isEmpty, firstKey, isFollowing]);
}

/** Moves the focus to the chosen row once it is mounted. */
function useFocusOf(content: React.RefObject<HTMLDivElement | null>, key: string | undefined): void {
  const focused = useRef<string>(undefined);
  useLayoutEffect(() => {
    if (key === undefined || focused.current === key) return;
    const element = elementOf(content.current, key);
    if (!element) return; // the next render has it
    element.focus({ preventScroll: true });
    focused.current = key;
  });
}

/** Loads older blocks. loadOnce does so once for each first block, so that a page that cannot be loaded is not requested again and again. */
function useOlder(firstBlockId: string | undefined, hasOlder: boolean, loadOlder: () => Promise<unknown>) {
  const [isLoading, setLoading] = useState(false);
  const loadedFor = useRef<string>(undefined);
  const load = () => {
    if (!hasOlder || isLoading) return;
    loadedFor.current = firstBlockId;
    setLoading(true);
    void loadOlder().finally(() => setLoading(false));
  };
  const loadOnce = () => {
    if (loadedFor.current !== firstBlockId) load();
  };
  return { isLoading, load, loadOnce };
}

/** Jumps once to the row of a block, and loads older blocks until it is there. */
function useJumpTo(blockId: string | undefined, rows: readonly Row[], loadOlder: () => void, jump: (row: Row, index: number) => void): void {
  const done = useRef<string>(undefined);
  useEffect(() => {
    if (!blockId || done.current === blockId) return;
    const index = rows.findIndex((row) => row.key === blockId || (row.type === "tool" && row.result?.id === blockId));
    if (index >= 0) {
      done.current = blockId;
      jump(rows[index]!, index);
    } else loadOlder();
  });
}

interface Keys {
  step: (by: 1 | -1) => void;
  next: (matches: (row: Row) => boolean) => void;
  toggle: () => void;
  toggleAll: () => void;
  end: () => void;
}

/** Handles the keys of the conversation while no field has the focus. No key decides a request. */
function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const handle = (event: KeyboardEvent) => {
      const target = event.target instanceof Element ? event.target : document.body;
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || takesKeys(target)) return;
      const { step, next, toggle, toggleAll, end } = latest.current;
      switch (event.key) {
        case "j":
        case "J":
          step(1);
          break;
        case "k":
        case "K":
          step(-1);
          break;
        case "Enter":
          if (!target.matches("[data-row]")) return; // a button handles its own Enter
          toggle();
          break;
        case "e":
          toggle();
          break;
        case "E":
          toggleAll();
          break;
        case ".":
          next(isFailure);
          break;
        case "a":
          next((row) => row.type === "approval" && row.approval.status === "pending");
          break;
        case "l":
        case "G":
          end();
          break;
        default:
          return;
      }
      event.preventDefault();
    };
    document.addEventListener("keydown", handle);
    return () => document.removeEventListener("keydown", handle);
  }, []);
}

/** Tells screen readers about each block when it is finished, and not about each piece of its text. */
function Announcements({ rows }: { rows: readonly Row[] }) {
  const finished = rows.findLast((row) => announcement(row) !== "");
  const first = useRef(finished?.key);
  return (
    <div className="visually-hidden" aria-live="polite">
      {finished && finished.key !== first.current && announcement(finished)}
    </div>
  );
}

function announcement(row: Row): string {
  if (row.type === "approval") return row.approval.status === "pending" ? `The agent asks: ${visible(row.approval.title ?? "")}` : "";
  if (row.type === "turn") return `The turn has ended: ${row.turn.phase}`;
  if (row.type === "tool" && row.result) return `${visible(summarize(row.block).name)}: ${isFailure(row) ? "failed" : "done"}`;
  if (row.type !== "block" || row.streaming || row.block.status === "pending") return "";
  if (row.block.kind === "assistant_text") return `Agent: ${visible((row.block.content ?? "").slice(0, 1000))}`;
  return row.block.kind === "error" ? `Error: ${visible(row.block.message ?? "")}` : "";
}
