import type { Block } from "@spoolhq/client";

/** A block of one kind. */
export type BlockOf<K extends Block["kind"]> = Extract<Block, { kind: K }>;

type Guard<K extends Block["kind"]> = (block: Block) => block is BlockOf<K>;

function isKind<K extends Block["kind"]>(kind: K): Guard<K> {
  return (block): block is BlockOf<K> => block.kind === kind;
}

export const isUserMessageBlock: Guard<"user_message"> = isKind("user_message");
export const isAssistantTextBlock: Guard<"assistant_text"> = isKind("assistant_text");
export const isThinkingBlock: Guard<"thinking"> = isKind("thinking");
export const isToolUseBlock: Guard<"tool_use"> = isKind("tool_use");
export const isToolResultBlock: Guard<"tool_result"> = isKind("tool_result");
export const isTodoBlock: Guard<"todo"> = isKind("todo");
export const isPlanBlock: Guard<"plan"> = isKind("plan");
export const isStepBlock: Guard<"step"> = isKind("step");
export const isSkillLoadBlock: Guard<"skill_load"> = isKind("skill_load");
export const isSystemBlock: Guard<"system"> = isKind("system");
export const isErrorBlock: Guard<"error"> = isKind("error");
export const isSubagentBlock: Guard<"subagent"> = isKind("subagent");
