import { Lexer, type Token, type Tokens } from "marked";
import { Fragment, memo, useRef, type ReactNode } from "react";
import { visible } from "../text";
import { Code } from "./code";

/** Deeper parts of a text are shown as they were written: a text of only ">" would otherwise nest thousands of levels. */
const maxDepth = 12;
/** Longer paragraphs are not searched for emphasis and links, which can take quadratic time. */
const maxInline = 8 * 1024;
/** Wider and longer tables are cut, with a word about it. */
const maxColumns = 40;
const maxTableRows = 500;

/** A lexer whose depth and time are bounded, whatever the text is. */
class BoundedLexer extends Lexer {
  #depth = 0;

  override blockTokens(src: string, tokens: Token[] = [], lastParagraphClipped?: boolean): any {
    return this.#nested(src, tokens, () => super.blockTokens(src, tokens, lastParagraphClipped));
  }

  override inlineTokens(src: string, tokens: Token[] = []): Token[] {
    if (src.length > maxInline) return plain(src, tokens);
    return this.#nested(src, tokens, () => super.inlineTokens(src, tokens));
  }

  #nested(src: string, tokens: Token[], parse: () => Token[]): Token[] {
    if (this.#depth >= maxDepth) return plain(src, tokens);
    this.#depth++;
    try {
      return parse();
    } finally {
      this.#depth--;
    }
  }
}

function plain(src: string, tokens: Token[]): Token[] {
  tokens.push({ type: "escape", raw: src, text: src });
  return tokens;
}

/** Returns the parts of a Markdown text from top to bottom. */
export function parseMarkdown(text: string): Token[] {
  return new BoundedLexer({ gfm: true }).lex(text);
}

/**
 * Returns the parts of a text that grows. Only the last two parts of the previous text are parsed again: no later
 * text changes the parts before them, except definitions of links, which are applied when the text is complete.
 */
export function parseGrowing(text: string, previous: { text: string; tokens: Token[] } | undefined): Token[] {
  if (!previous || !text.startsWith(previous.text)) return parseMarkdown(text);
  const kept = previous.tokens.slice(0, -2);
  const length = kept.reduce((n, token) => n + token.raw.length, 0);
  // The lexer replaces some characters, so that the raw texts may have another length than the text.
  if (kept.map((token) => token.raw).join("") !== text.slice(0, length)) return parseMarkdown(text);
  return [...kept, ...parseMarkdown(text.slice(length))];
}

/**
 * Markdown as React elements. There is no HTML on the way: tags in the text are shown as text, links lead to http,
 * https and mailto only, and images are not loaded.
 */
export const Markdown = memo(function Markdown({ text, streaming = false }: { text: string; streaming?: boolean }) {
  const previous = useRef<{ text: string; tokens: Token[]; streaming: boolean }>(undefined);
  let parsed = previous.current;
  if (parsed?.text !== text || parsed.streaming !== streaming) {
    parsed = { text, streaming, tokens: streaming ? parseGrowing(text, previous.current) : parseMarkdown(text) };
    previous.current = parsed;
  }
  return (
    <div className="markdown" dir="auto">
      {parsed.tokens.map((token, i) => (
        <Part key={i} token={token} raw={token.raw} />
      ))}
    </div>
  );
});

/** A part at the top of a text. It is rendered again only if its own text changes. */
const Part = memo(
  function Part({ token }: { token: Token; raw: string }) {
    return renderBlock(token);
  },
  (a, b) => a.raw === b.raw && a.token.type === b.token.type,
);

function renderBlocks(tokens: readonly Token[] | undefined): ReactNode {
  return tokens?.map((token, i) => <Fragment key={i}>{renderBlock(token)}</Fragment>);
}

function renderBlock(token: Token): ReactNode {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "paragraph":
      return <p dir="auto">{renderInline(token.tokens)}</p>;
    case "heading":
      return (
        <p className={`markdown-heading markdown-heading-${(token as Tokens.Heading).depth}`} role="heading" aria-level={Math.min(6, (token as Tokens.Heading).depth + 2)} dir="auto">
          {renderInline(token.tokens)}
        </p>
      );
    case "code":
      return <Code text={(token as Tokens.Code).text} language={(token as Tokens.Code).lang} />;
    case "blockquote":
      return <blockquote>{renderBlocks(token.tokens)}</blockquote>;
    case "hr":
      return <hr />;
    case "list":
      return renderList(token as Tokens.List);
    case "table":
      return <Table table={token as Tokens.Table} />;
    case "text":
      return token.tokens ? renderInline(token.tokens) : visible(decode((token as Tokens.Text).text));
    case "html":
      return <p className="markdown-html">{visible(token.raw.trimEnd())}</p>;
    default:
      return renderInline([token]);
  }
}

function renderList(list: Tokens.List): ReactNode {
  const items = list.items.map((item, i) => (
    <li key={i} className={item.task ? "markdown-task" : undefined} dir="auto">
      {item.task && <input type="checkbox" checked={item.checked ?? false} disabled readOnly aria-label={item.checked ? "done" : "not done"} />}
      {renderBlocks(item.tokens.filter((token) => token.type !== "checkbox"))}
    </li>
  ));
  return list.ordered ? <ol start={list.start === "" ? 1 : list.start}>{items}</ol> : <ul>{items}</ul>;
}

function Table({ table }: { table: Tokens.Table }) {
  const columns = Math.min(table.header.length, maxColumns);
  const rows = table.rows.slice(0, maxTableRows);
  const cut = columns < table.header.length || rows.length < table.rows.length;
  const cell = (content: Tokens.TableCell, i: number, Name: "th" | "td") => (
    <Name key={i} style={{ textAlign: table.align[i] ?? undefined }} dir="auto">
      {renderInline(content.tokens)}
    </Name>
  );
  return (
    <>
      <div className="markdown-table" tabIndex={0} role="region" aria-label="Table">
        <table>
          <thead>
            <tr>{table.header.slice(0, columns).map((content, i) => cell(content, i, "th"))}</tr>
          </thead>
          <tbody>
            {rows.map((row, i) => (
              <tr key={i}>{row.slice(0, columns).map((content, j) => cell(content, j, "td"))}</tr>
            ))}
          </tbody>
        </table>
      </div>
      {cut && (
        <details className="markdown-cut">
          <summary>
            The table has {table.header.length} columns and {table.rows.length} rows; {columns} and {rows.length} are shown. Show its text
          </summary>
          <pre>{visible(table.raw)}</pre>
        </details>
      )}
    </>
  );
}

function renderInline(tokens: readonly Token[] | undefined): ReactNode {
  return tokens?.map((token, i) => <Fragment key={i}>{renderSpan(token)}</Fragment>);
}

function renderSpan(token: Token): ReactNode {
  switch (token.type) {
    case "strong":
      return <strong>{renderInline(token.tokens)}</strong>;
    case "em":
      return <em>{renderInline(token.tokens)}</em>;
    case "del":
      return <del>{renderInline(token.tokens)}</del>;
    case "codespan":
      return <code>{visible((token as Tokens.Codespan).text)}</code>;
    case "br":
      return <br />;
    case "link":
      return renderLink((token as Tokens.Link).href, renderInline(token.tokens));
    case "image":
      return renderLink((token as Tokens.Image).href, `image: ${visible((token as Tokens.Image).text || (token as Tokens.Image).href)}`);
    case "text":
      return token.tokens ? renderInline(token.tokens) : visible(decode((token as Tokens.Text).text));
    case "escape":
      return visible((token as Tokens.Escape).text);
    default:
      return visible(token.raw);
  }
}

/**
 * Returns a link, or only its text if it does not lead to a web page or a mail address. The address is written whole: browsers
 * resolve "http:path" relative to the page.
 */
function renderLink(href: string, content: ReactNode): ReactNode {
  if (!isSafeLink(href)) return <span title={visible(href)}>{content}</span>;
  return (
    <a href={new URL(href).href} target="_blank" rel="noopener noreferrer nofollow" title={visible(href)}>
      {content}
    </a>
  );
}

/** Reports whether a link has the scheme http, https or mailto. A relative link would lead into the inspector itself. */
export function isSafeLink(href: string): boolean {
  return URL.canParse(href) && ["http:", "https:", "mailto:"].includes(new URL(href).protocol);
}

const entities: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: " ", mdash: "—", ndash: "–", hellip: "…" };

/** Replaces the usual entities of HTML, which Markdown allows in text. */
function decode(text: string): string {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,6}));/gi, (whole, decimal?: string, hex?: string, name?: string) => {
    if (name) return entities[name] ?? whole;
    const point = decimal ? Number(decimal) : parseInt(hex!, 16);
    return point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}
