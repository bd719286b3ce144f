/** Returns the number of bytes of a text in UTF-8. */
export function utf8Length(text: string): number {
  let bytes = text.length;
  for (let i = 0; i < text.length; i++) {
    const c = text.charCodeAt(i);
    if (c < 0x80) continue;
    bytes += c < 0x800 ? 1 : 2;
    if (c >= 0xd800 && c < 0xdc00 && (text.charCodeAt(i + 1) & 0xfc00) === 0xdc00) i++; // four bytes for two units
  }
  return bytes;
}

/** Returns a text without its first bytes in UTF-8. */
export function dropUtf8(text: string, bytes: number): string {
  return bytes === 0 ? text : new TextDecoder("utf-8", { ignoreBOM: true }).decode(new TextEncoder().encode(text).subarray(bytes));
}

/** A piece of the text of a block: `offset` counts the bytes in UTF-8 before it. */
export interface TextPiece {
  offset: number;
  delta: string;
}

/** The text of one open block: what is known from its start without a gap, and pieces that came ahead of a gap. */
export class StreamedText {
  known = "";
  #bytes = 0; // of known
  readonly #waiting: TextPiece[] = []; // sorted by offset

  /** Adds a piece. Pieces may come in any order and several times. */
  add(piece: TextPiece): void {
    if (piece.offset > this.#bytes) {
      let low = 0;
      let high = this.#waiting.length;
      if (high > 0 && this.#waiting[high - 1]!.offset <= piece.offset) low = high; // the usual case
      while (low < high) {
        const middle = (low + high) >>> 1;
        if (this.#waiting[middle]!.offset < piece.offset) low = middle + 1;
        else high = middle;
      }
      this.#waiting.splice(low, 0, piece);
      return;
    }
    this.#append(piece);
    let used = 0;
    while (used < this.#waiting.length && this.#waiting[used]!.offset <= this.#bytes) this.#append(this.#waiting[used++]!);
    if (used > 0) this.#waiting.splice(0, used);
  }

  #append(piece: TextPiece): void {
    const bytes = utf8Length(piece.delta);
    const known = this.#bytes - piece.offset;
    if (known >= bytes) return;
    this.known += dropUtf8(piece.delta, known);
    this.#bytes += bytes - known;
  }
}
