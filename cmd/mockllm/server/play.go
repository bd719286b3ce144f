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

// contentBlock is one content block of an answer: a text, a thinking text, or a tool call.
type contentBlock struct {
	kind      scriptStepKind // stepText, stepThinking or stepToolCalls
	id        string         // without a dialect's prefix
	name      string         // of the tool
	namespace string         // of the tool, "" for none
	custom    bool
	text      string // empty when it is opened in a stream
}

// answerEnd describes the end of an answer: its stop reason and number of output tokens, or an error.
type answerEnd struct {
	stop   string
	output int // tokens
	fault  *apiError
}

// answerSink receives the answer to a request part by part and writes it to the client in the format of one API. Its
// methods return an error when the client has closed the connection.
type answerSink interface {
	// openBlock starts a content block, whose text follows.
	openBlock(b contentBlock) error
	// writeText appends text to the open block.
	writeText(text string) error
	// closeBlock ends the open block.
	closeBlock() error
	// endAnswer ends the answer.
	endAnswer(e answerEnd) error
}

// errScriptedBreak is returned by sendPlan when the script demands that the server cuts the connection to the client.
var errScriptedBreak = errors.New("scripted break")

// sendPlan sends the parts of a plan to out, with their delays. It returns the error of ctx if the client closes the
// connection before the end.
func sendPlan(ctx context.Context, p answerPlan, id string, out answerSink) error {
	written, blocks := 0, 0
	for i, part := range p.parts {
		switch part.kind {
		case stepDelay:
			if err := sleep(ctx, part.delay); err != nil {
				return err
			}
		case stepCutConnection:
			return errScriptedBreak
		case stepError:
			return out.endAnswer(answerEnd{fault: part.fault, output: estimateTokens(written)})
		case stepText, stepThinking, stepToolCalls, stepEndlessText:
			b := contentBlock{kind: part.kind, id: blockID(id, blocks), name: part.name, custom: part.custom, namespace: part.namespace}
			blocks++
			if err := sendBlock(ctx, part, b, out); err != nil {
				return err
			}
			// An answer that breaks off ends in the middle of a block.
			if i+1 == len(p.parts) || p.parts[i+1].kind != stepCutConnection && p.parts[i+1].kind != stepError {
				if err := out.closeBlock(); err != nil {
					return err
				}
			}
			written += len(part.name) + len(part.text)
		case stepStopReason:
		}
	}
	return out.endAnswer(answerEnd{stop: p.stop, output: estimateTokens(written)})
}

// sendBlock writes one content block to out, with the pauses between the pieces of its text.
func sendBlock(ctx context.Context, p planPart, b contentBlock, out answerSink) error {
	endless := p.kind == stepEndlessText
	if endless {
		b.kind = stepText
	}
	if err := out.openBlock(b); err != nil {
		return err
	}
	for first := true; first || endless; first = false {
		for i, piece := range splitText(p.text, p.pacing.piece) {
			if i > 0 || !first {
				if err := sleep(ctx, p.pacing.delay); err != nil {
					return err
				}
			}
			if err := out.writeText(piece); err != nil {
				return err
			}
		}
	}
	return nil
}

// sleep blocks for a duration. It returns the error of ctx if ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
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

// splitText cuts text into pieces of at most size bytes, but of at least one rune.
func splitText(text string, size int) []string {
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

// bufferedAnswer is the answerSink of an answer that is not streamed. It collects the content blocks in memory.
type bufferedAnswer struct {
	blocks []contentBlock
	ending answerEnd
}

func (c *bufferedAnswer) openBlock(b contentBlock) error { c.blocks = append(c.blocks, b); return nil }

func (c *bufferedAnswer) writeText(text string) error {
	c.blocks[len(c.blocks)-1].text += text
	return nil
}

func (c *bufferedAnswer) closeBlock() error { return nil }

func (c *bufferedAnswer) endAnswer(e answerEnd) error { c.ending = e; return nil }
