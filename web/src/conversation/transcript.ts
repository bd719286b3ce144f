import type { Block } from "@spoolhq/client";
import { count, formatDuration } from "./format";
import { summarize } from "./tools";

/**
 * Returns blocks as a Markdown document: the whole of what was said and of what tools did. Texts are as the agent wrote them;
 * text of tools is in code blocks.
 */
export function transcriptMarkdown(blocks: readonly Block[]): string {
  return blocks.map(blockMarkdown).filter(Boolean).join("\n\n") + "\n";
}

function blockMarkdown(block: Block): string {
  switch (block.kind) {
    case "user_message":
      return `## User\n\n${block.parts ? block.parts.map((part) => (part.type === "text" ? (part.text ?? "") : `[image, ${part.mediaType ?? "unknown type"}]`)).join("\n\n") : (block.content ?? "")}`;
    case "assistant_text":
      return `## Agent\n\n${block.content ?? ""}`;
    case "thinking":
      return block.content || block.summary ? `### Thinking\n\n${quote(block.content ?? block.summary ?? "")}` : "";
    case "tool_use": {
      const { name, argument } = summarize(block);
      return `### Tool: ${oneLine(name)}\n\n${argument ? `${code(argument)}\n\n` : ""}${fenced(JSON.stringify(block.input, undefined, 2) ?? "", "json")}`;
    }
    case "tool_result":
      return `### Result${block.isError ? " (failed)" : ""}${block.durationMs ? `, ${formatDuration(block.durationMs)}` : ""}\n\n${fenced(block.output ?? "")}`;
    case "subagent":
      return `### Sub-agent: ${oneLine(block.name ?? block.subagentId ?? "")}\n\n${fenced(block.output ?? "")}`;
    case "todo":
    case "plan":
      return `### Plan, ${count(block.todos?.length ?? 0, "item")}\n\n${(block.todos ?? []).map((item) => `- [${item.status === "completed" ? "x" : " "}] ${oneLine(item.content)}`).join("\n")}`;
    case "step":
      return block.step ? `### Step: ${oneLine(block.step.title)} (${block.step.status})\n\n${fenced(block.step.errorMessage ?? block.step.result ?? "")}` : "";
    case "skill_load":
      return quote(`Skill loaded: ${oneLine(block.skill?.name ?? "")}`);
    case "system":
      return quote(`${block.subtype ?? "system"}: ${block.message ?? ""}`);
    case "error":
      return quote(`Error ${block.code ?? ""}: ${block.message ?? ""}`);
  }
}

function oneLine(text: string): string {
  return text.replace(/\s+/g, " ").trim();
}

function quote(text: string): string {
  return text.replace(/^/gm, "> ");
}

/** Returns a text as code on one line, whatever backticks it has. */
function code(text: string): string {
  const ticks = "`".repeat(longestRun(text) + 1);
  return `${ticks} ${oneLine(text)} ${ticks}`;
}

/** Returns a text as a code block, whose fence is longer than any in the text. */
function fenced(text: string, language = ""): string {
  const fence = "`".repeat(Math.max(3, longestRun(text) + 1));
  return `${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

function longestRun(text: string): number {
  let longest = 0;
  for (const [run] of text.matchAll(/`+/g)) longest = Math.max(longest, run.length);
  return longest;
}
