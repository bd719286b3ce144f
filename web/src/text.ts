// The characters that a reader does not see, or that change how the text around them is shown: as in pkg/visible.
const hidden = /[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\p{Variation_Selector}\u2800\ufffc\u{13441}\u{13442}\u{1d159}]|(?! )\p{Zs}|(?<=[\p{Mn}\p{Me}]{8})[\p{Mn}\p{Me}]/gu;

/**
 * Returns a text in which all characters can be seen: control and format characters, directions of text, characters without ink,
 * lone surrogates, and combining marks after the eighth become escapes such as \u{1b}. Line feeds and tabs stay.
 */
export function visible(text: string): string {
  return text.replace(hidden, (c) => (c === "\n" || c === "\t" ? c : `\\u{${c.codePointAt(0)!.toString(16)}}`));
}
