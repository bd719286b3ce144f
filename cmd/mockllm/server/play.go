package server

import (
	"context"
	"errors"
	"time"
	"unicode/utf8"
)

// answerHeader holds the fields of an answer other than its content blocks.
type answerHeader struct {
	id      string // without a dialect's prefix
	model   string
	created int64 // Unix seconds
	input   int   // tokens
	usage   bool  // Chat Completions: send a usage chunk
}

// block is one content block of an answer: a text, a thinking text, or a tool call.
type block struct {
	kind      stepKind // stepText, stepThinking or stepTools
	id        string   // without a dialect's prefix
	name      string   // of the tool
	namespace string   // of the tool, "" for none
	custom    bool
	text      string // empty when it is opened in a stream
}

// ending is the end of an answer: its stop reason and output tokens, or an error.
type ending struct {
	stop   string
	output int // tokens
	fault  *fault
}

// sink receives an answer piece by piece and writes it to the client in the format of a dialect. Its methods return an
// error when the client is gone.
type sink interface {
	// open starts a block; its text follows.
	open(b block) error
	// piece adds text to the open block.
	piece(text string) error
	// close ends the open block.
	close() error
	// finish ends the answer.
	finish(e ending) error
}

// errBroken is returned by play when the script demands that the connection to the client is cut.
var errBroken = errors.New("scripted break")

// play sends a plan. When ctx ends, the client has interrupted the answer.
func play(ctx context.Context, p plan, id string, out sink) error {
	written, blocks := 0, 0
	for i, part := range p.parts {
		switch part.kind {
		case stepDelay:
			if err := wait(ctx, part.delay); err != nil {
				return err
			}
		case stepBreak:
			return errBroken
		case stepError:
			return out.finish(ending{fault: part.fault, output: tokens(written)})
		case stepText, stepThinking, stepTools, stepEndless:
			b := block{kind: part.kind, id: blockID(id, blocks), name: part.name, custom: part.custom, namespace: part.namespace}
			blocks++
			if err := playBlock(ctx, part, b, out); err != nil {
				return err
			}
			// An answer that breaks off ends in the middle of a block.
			if i+1 == len(p.parts) || p.parts[i+1].kind != stepBreak && p.parts[i+1].kind != stepError {
				if err := out.close(); err != nil {
					return err
				}
			}
			written += len(part.name) + len(part.text)
		case stepStop:
		}
	}
	return out.finish(ending{stop: p.stop, output: tokens(written)})
}

// playBlock opens a block and fills it.
func playBlock(ctx context.Context, p part, b block, out sink) error {
	endless := p.kind == stepEndless
	if endless {
		b.kind = stepText
	}
	if err := out.open(b); err != nil {
		return err
	}
	for first := true; first || endless; first = false {
		for i, piece := range pieces(p.text, p.pacing.piece) {
			if i > 0 || !first {
				if err := wait(ctx, p.pacing.delay); err != nil {
					return err
				}
			}
			if err := out.piece(piece); err != nil {
				return err
			}
		}
	}
	return nil
}

// wait waits for a duration. It returns the error of ctx if ctx ends before.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// pieces cuts text into pieces of at most size bytes, and at least one rune.
func pieces(text string, size int) []string {
	var all []string
	for len(text) > size {
		cut := size
		for cut > 0 && !utf8.RuneStart(text[cut]) {
			cut--
		}
		if cut == 0 {
			_, cut = utf8.DecodeRuneInString(text)
		}
		all = append(all, text[:cut])
		text = text[cut:]
	}
	return append(all, text)
}

// wholeAnswer is the sink of an answer that is not streamed.
type wholeAnswer struct {
	blocks []block
	ending ending
}

func (c *wholeAnswer) open(b block) error { c.blocks = append(c.blocks, b); return nil }

func (c *wholeAnswer) piece(text string) error {
	c.blocks[len(c.blocks)-1].text += text
	return nil
}

func (c *wholeAnswer) close() error { return nil }

func (c *wholeAnswer) finish(e ending) error { c.ending = e; return nil }
