package client

import (
	"context"
	"encoding/json"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// GetState returns the state of a session after the event with the seq at, or after the last event if at is nil. It
// combines the blocks of all pages.
func (c *Client) GetState(ctx context.Context, session string, at *uint32) (doc APIObject[*spoolv1.SessionState], err error) {
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
			return doc, c.wrapDecodeError(err)
		}
		if state == nil {
			state = members
		}
		for name := range lists {
			var part []json.RawMessage
			if members[name] != nil {
				if err := json.Unmarshal(members[name], &part); err != nil {
					return doc, c.wrapDecodeError(err)
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
		if state[name], err = encodeJSON(list); err != nil {
			return doc, err
		}
	}
	raw, err := encodeJSON(state)
	if err != nil {
		return doc, err
	}
	return doc, c.wrapDecodeError(doc.UnmarshalJSON(raw))
}

// EventsPage is a page of stored events of a session. The events are decoded as they are stored, because the data of an
// event depends on its type and has no generated message.
type EventsPage struct {
	Events []APIObject[events.WireEvent] `json:"events"`
	End    uint32                        `json:"-"` // the value of Next on the last page
	Next   uint32                        `json:"next"`
}

// ListEvents returns a page of the events of a session whose seq is greater than after.
func (c *Client) ListEvents(ctx context.Context, session string, after uint32) (page EventsPage, err error) {
	doc, err := Call(ctx, c.Events.ListEvents, &spoolv1.ListEventsRequest{SessionId: session, After: after})
	if err != nil {
		return page, err
	}
	page.End = doc.Value.Tip
	return page, c.wrapDecodeError(json.Unmarshal(doc.Raw, &page))
}

// ListHistory returns a page of the events that a fork has inherited from its ancestors. It skips the first events up
// to the number after.
func (c *Client) ListHistory(ctx context.Context, session string, after uint32) (page EventsPage, err error) {
	doc, err := Call(ctx, c.Events.ListHistory, &spoolv1.ListHistoryRequest{SessionId: session, After: after})
	if err != nil {
		return page, err
	}
	page.End = doc.Value.Total
	return page, c.wrapDecodeError(json.Unmarshal(doc.Raw, &page))
}
