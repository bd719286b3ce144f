import assert from "node:assert/strict";
import { test } from "node:test";
import { renderToStaticMarkup } from "react-dom/server";
import { isSafeLink, Markdown, parseGrowing, parseMarkdown } from "../src/conversation/markdown";
import { parse } from "./dom";

const render = (text: string) => parse(renderToStaticMarkup(<Markdown text={text} />));

for (const [name, text] of Object.entries({
  "an image with a handler": "<img src=x onerror=alert(1)>",
  "a script": "<script>alert(1)</script>",
  "a script within a paragraph": "a <script>alert(1)</script> b",
  "an image of another host": "![track](https://evil.example/x.png)",
  "a link that runs a script": "[click](javascript:alert(1))",
  "a link that runs a script, with entities": "[click](java&#115;cript:alert(1)) [click](  JAVASCRIPT:alert(1))",
  "a link with data": "[click](data:text/html,<script>alert(1)</script>)",
  "an autolink": "<javascript:alert(1)>",
  "a title that ends its attribute": '[a](https://example.com "x\\" onclick=\\"alert(1)")',
  "a language that ends its attribute": '```"><img src=x onerror=alert(1)>\ncode\n```',
  "a frame in a table": "| a |\n| - |\n| <iframe src=//evil.example> |",
})) {
  test(`Markdown makes nothing that runs or loads of ${name}`, () => {
    const body = render(text);
    assert.deepEqual([...body.querySelectorAll("script, img, iframe, object, style, svg, form")].map((element) => element.tagName), []);
    for (const element of body.querySelectorAll("*")) {
      for (const attribute of element.getAttributeNames()) assert.doesNotMatch(attribute, /^on|^src/);
      const href = element.getAttribute("href");
      if (href !== null) assert.match(href, /^https:\/\/(evil\.)?example(\.com)?/);
    }
  });
}

test("Markdown shows tags as text", () => {
  assert.equal(render("a <b onclick=x>c</b>").textContent, "a <b onclick=x>c</b>");
});

test("Markdown opens links apart from the page", () => {
  const link = render("[docs](https://example.com/a)").querySelector("a")!;
  assert.equal(link.getAttribute("rel"), "noopener noreferrer nofollow");
  assert.equal(link.getAttribute("target"), "_blank");
});

test("Markdown writes the whole address of a link, so that none leads into the inspector", () => {
  const hrefs = [...render("[a](http:approvals) [b](https:/evil.example) [c](mailto:a@a.example)").querySelectorAll("a")].map((a) => a.getAttribute("href"));
  assert.deepEqual(hrefs, ["http://approvals/", "https://evil.example/", "mailto:a@a.example"]);
});

test("isSafeLink accepts web pages and mail only", () => {
  for (const href of ["https://a.example", "http://a.example/x", "mailto:a@a.example"]) assert.equal(isSafeLink(href), true, href);
  for (const href of ["javascript:alert(1)", "java\tscript:alert(1)", "data:text/html,x", "file:///etc/passwd", "/api/keys", "//evil.example", "#x", ""]) assert.equal(isSafeLink(href), false, href);
});

test("Markdown makes characters visible that change the direction of text", () => {
  assert.match(render("a \u202e b `\0`").textContent!, /\\u\{202e\}.*\\u\{0\}/);
});

test("Markdown decodes the entities that Markdown allows, and no entity in code", () => {
  assert.equal(render("AT&amp;T &#65; &unknown; `&lt;`").textContent, "AT&T A &unknown; &lt;");
});

test("Markdown draws lists, tasks and tables", () => {
  const body = render("- [x] done\n- [ ] open\n\n1. a\n   - b\n\n| h | i |\n| - | -: |\n| 1 | 2 |");
  assert.equal(body.querySelectorAll("input[type=checkbox]").length, 2);
  assert.equal(body.querySelectorAll("ol ul li").length, 1);
  assert.deepEqual([...body.querySelectorAll("td")].map((cell) => cell.textContent), ["1", "2"]);
});

for (const [name, text] of Object.entries({
  quotes: ">".repeat(60_000),
  "numbered lists in one line": "1. ".repeat(20_000),
  "quotes and lists in one line": "> - ".repeat(15_000),
  lists: Array.from({ length: 300 }, (_, i) => " ".repeat(i * 2) + "- a").join("\n"),
  brackets: "[".repeat(60_000),
  "emphasis marks": "*a **b ".repeat(9_000),
  backticks: Array.from({ length: 300 }, (_, i) => "`".repeat(i)).join(" "),
})) {
  test(`parseMarkdown nests ${name} only so deep`, () => {
    assert.ok(depthOf(parseMarkdown(text)) <= 30);
  });
}

/** Returns how deep tokens nest, items of lists included. */
function depthOf(tokens: readonly object[]): number {
  let depth = 0;
  for (const token of tokens) {
    const { tokens: inner, items } = token as { tokens?: object[]; items?: object[] };
    depth = Math.max(depth, 1 + depthOf(inner ?? items ?? []));
  }
  return depth;
}

test("Markdown cuts a table of 10,000 columns and says so", () => {
  const row = (cell: string) => `|${` ${cell} |`.repeat(10_000)}\n`;
  const body = render(row("h") + row("-") + row("1"));
  assert.equal(body.querySelectorAll("th").length, 40);
  assert.match(body.querySelector("summary")!.textContent!, /10000 columns/);
});

test("parseGrowing parses a text that grows as parseMarkdown does", () => {
  const text = "# Title\n\nOne *two*\nthree\n\n- a\n- b\n\n  c\n\n```go\nx := 1\n\ny\n```\n\n> quote\n\n| a |\n| - |\n| b |\n\nSetext\n===\n\nend";
  let previous: { text: string; tokens: ReturnType<typeof parseMarkdown> } | undefined;
  for (let length = 1; length <= text.length; length++) {
    const grown = text.slice(0, length);
    previous = { text: grown, tokens: parseGrowing(grown, previous) };
    assert.deepEqual(previous.tokens.map(withoutLinks), [...parseMarkdown(grown)].map(withoutLinks), JSON.stringify(grown));
  }
});

function withoutLinks(token: object): unknown {
  return JSON.parse(JSON.stringify(token));
}
