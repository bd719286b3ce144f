import type { ToolKind } from "./tools";

/** Paths in a square of 16 by 16, drawn as lines. */
const paths: Record<ToolKind | "thinking", string> = {
  command: "M3 4l4 4-4 4M8.5 12.5H13",
  edit: "M10.5 3l2.5 2.5L6 12.5l-3.2.7.7-3.2z",
  read: "M4 2.5h5.5L12.5 5.5V13.5H4zM9.5 2.5V5.5h3",
  search: "M7 3a4 4 0 100 8 4 4 0 000-8zM10 10l3.5 3.5",
  web: "M8 2.5a5.5 5.5 0 100 11 5.5 5.5 0 000-11zM2.5 8h11M8 2.5c-3.5 3.5-3.5 7.5 0 11 3.5-3.5 3.5-7.5 0-11",
  plan: "M3 4l1 1 1.5-2M3 8.5l1 1 1.5-2M3 13l1 1 1.5-2M8 4.5h5.5M8 9h5.5M8 13.5h5.5",
  agent: "M4.5 2.5v8M4.5 10.5a1.5 1.5 0 100 3 1.5 1.5 0 000-3zM11.5 2.5a1.5 1.5 0 100 3 1.5 1.5 0 000-3zM11.5 5.5c0 3-7 2-7 5",
  question: "M5.5 6a2.5 2.5 0 114 2c-1 .7-1.5 1.200-1.5 2.200M8 12.700v.3",
  skill: "M8 2.5l1.600 3.600 3.900.4-2.900 2.600.8 3.900L8 11l-3.400 2 .8-3.900L2.5 6.5l3.900-.4z",
  other: "M8 2.5l4.800 2.700v5.600L8 13.5l-4.800-2.700V5.200z",
  thinking: "M3 8h.1M8 8h.1M13 8h.1",
};

/** An icon without a meaning of its own: the text beside it names it. */
export function Icon({ name }: { name: keyof typeof paths }) {
  return (
    <svg className={`icon icon-${name}`} width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
      <path d={paths[name]} fill="none" stroke="currentColor" strokeWidth={name === "thinking" ? 2.2 : 1.3} strokeLinecap="round" strokeLinejoin="round" />
    </svg>
  );
}
