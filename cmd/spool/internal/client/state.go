package client

import (
	"context"
	"encoding/json"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// State returns the state of a session after an event (nil: the last one), with the blocks of all pages.
func (c *Client) State(ctx context.Context, session string, at *uint32) (doc Doc[*spoolv1.SessionState], err error) {
	request := &spoolv1.GetSessionStateRequest{SessionId: session, At: at, PageSize: 200}
	lists := map[string][]json.RawMessage{"blocks": {}, "incompleteText": {}} // the members that pages split
	var state map[string]json.RawMessage
	for {
		page, err := Call(ctx, c.Sessions.GetSessionState, request)
		if err != nil {
			return doc, err
		}
		var members map[string]json.RawMessage
		if err := json.Unmarshal(page.Raw, &members); err != nil {
			return doc, c.decodeError(err)
		}
		if state == nil {
			state = members
		}
		for name := range lists {
			var part []json.RawMessage
			if members[name] != nil {
				if err := json.Unmarshal(members[name], &part); err != nil {
					return doc, c.decodeError(err)
				}
			}
			lists[name] = append(lists[name], part...)
		}
		if request.PageToken = page.Value.NextPageToken; request.PageToken == "" {
			break
		}
	}
	delete(state, "nextPageToken")
	for name, list := range lists {
		if state[name], err = encode(list); err != nil {
			return doc, err
		}
	}
	raw, err := encode(state)
	if err != nil {
		return doc, err
	}
	return doc, c.decodeError(doc.UnmarshalJSON(raw))
}

// EventsPage is a page of stored events. Events are decoded as they are stored: data depends on an event's type, which
// the generated messages do not describe.
type EventsPage struct {
	Events []Doc[events.WireEvent] `json:"events"`
	End    uint32                  `json:"-"` // the value of Next on the last page
	Next   uint32                  `json:"next"`
}

// Events returns a page of a session's events with a greater seq than after.
func (c *Client) Events(ctx context.Context, session string, after uint32) (page EventsPage, err error) {
	doc, err := Call(ctx, c.events.ListEvents, &spoolv1.ListEventsRequest{SessionId: session, After: after})
	if err != nil {
		return page, err
	}
	page.End = doc.Value.Tip
	return page, c.decodeError(json.Unmarshal(doc.Raw, &page))
}

// History returns a page of the events that a fork inherits from its ancestors, without the first ones up to after.
func (c *Client) History(ctx context.Context, session string, after uint32) (page EventsPage, err error) {
	doc, err := Call(ctx, c.events.ListHistory, &spoolv1.ListHistoryRequest{SessionId: session, After: after})
	if err != nil {
		return page, err
	}
	page.End = doc.Value.Total
	return page, c.decodeError(json.Unmarshal(doc.Raw, &page))
}
