package system

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// TurnTimes holds two times of a turn, as the client measured them.
type TurnTimes struct {
	Posted    time.Time // the client began to post the message
	FirstText time.Time // the WebSocket received the first text
}

// Latency returns the time from the client's message to the first text of the answer.
func (t TurnTimes) Latency() time.Duration { return t.FirstText.Sub(t.Posted) }

// TakeTurn posts text as a message to the session that the socket has joined, and reads the socket until the turn has
// completed. It returns an error if the turn ends otherwise or has no text. It calls observe, unless that is nil, with
// every event and the time at which it was received.
func (c *Client) TakeTurn(ctx context.Context, s *SessionSocket, session, text string, observe func(events.WireEvent, time.Time) error) (TurnTimes, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	posted := make(chan string, 1)
	t := TurnTimes{Posted: time.Now()}
	go func() {
		execution, err := c.PostMessage(ctx, session, text)
		if err != nil {
			cancel(fmt.Errorf("post a message: %w", err))
		}
		posted <- execution
	}()
	// The text may arrive before the response to the POST.
	for {
		w, received, err := s.Next(ctx)
		if err != nil {
			return t, errors.Join(err, context.Cause(ctx))
		}
		if observe != nil {
			if err := observe(w, received); err != nil {
				return t, err
			}
		}
		part, ok, err := AgentTextOf(w)
		if err != nil {
			return t, err
		}
		if ok && part.Piece != "" && t.FirstText.IsZero() {
			t.FirstText = received
		}
		if !events.IsTerminal(w.Type) {
			continue
		}
		if w.ExecutionID != <-posted || w.Type != (events.ExecutionCompleted{}).EventType() || t.FirstText.IsZero() {
			return t, errors.Join(fmt.Errorf("turn ended with %s of %s: %s", w.Type, w.ExecutionID, w.Data), context.Cause(ctx))
		}
		return t, nil
	}
}
