/** One server-sent event. */
export interface ServerSentEvent {
  /** The type of the event; "message" if the server names none. */
  type: string;
  data: string;
  lastEventId: string;
}

const maxEventLength = 64 << 20;

/**
 * Parses a stream of server-sent events as the HTML standard defines it: lines end with CR, LF or CRLF, chunks may be cut
 * anywhere, a byte order mark and comments are skipped, and an event that is not complete at the end is dropped.
 */
export class ServerSentEventParser {
  readonly #decoder = new TextDecoder();
  #line = ""; // the beginning of the line that is not complete
  #afterCR = false; // the last line ended with CR, so that an LF belongs to it
  #type = "";
  #data: string[] = [];
  #length = 0; // of #data
  #lastEventId = "";

  /** Parses the next bytes, and returns the events that they complete. */
  push(chunk: Uint8Array): ServerSentEvent[] {
    const text = this.#decoder.decode(chunk, { stream: true });
    const out: ServerSentEvent[] = [];
    const ends = /\r\n|\r|\n/g;
    let start = 0;
    if (this.#afterCR && text !== "") {
      if (text.startsWith("\n")) start = ends.lastIndex = 1;
      this.#afterCR = false;
    }
    for (let end; (end = ends.exec(text)); start = ends.lastIndex) {
      const line = this.#line + text.slice(start, end.index);
      this.#line = "";
      this.#afterCR = end[0] === "\r" && ends.lastIndex === text.length;
      this.#parseLine(line, out);
    }
    this.#line += text.slice(start);
    if (this.#line.length + this.#length > maxEventLength) throw new Error(`a server-sent event is longer than ${maxEventLength} characters`);
    return out;
  }

  #parseLine(line: string, out: ServerSentEvent[]): void {
    if (line === "") {
      if (this.#data.length > 0) out.push({ type: this.#type || "message", data: this.#data.join("\n"), lastEventId: this.#lastEventId });
      this.#type = "";
      this.#data = [];
      this.#length = 0;
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "event") this.#type = value;
    else if (field === "id" && !value.includes("\0")) this.#lastEventId = value;
    else if (field === "data") {
      this.#data.push(value);
      this.#length += value.length;
    }
  }
}
