package client_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
)

// TestFollowSessions_ContinuesAtItsCursor tests with a server that cuts each connection after one change that the client joins with the cursor of the last
// change, and yields each change once.
func TestFollowSessions_ContinuesAtItsCursor(t *testing.T) {
	t.Parallel()
	const changes = 5
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.CloseNow() }()
		_, data, err := conn.Read(r.Context())
		var join struct{ Type, Cursor string }
		if err != nil || json.Unmarshal(data, &join) != nil || join.Type != "sessions:join" {
			t.Errorf("%s, %v", data, err)
		}
		n := 0
		if join.Cursor != "" {
			if _, err := fmt.Sscan(join.Cursor, &n); err != nil {
				t.Error(err)
			}
		}
		messages := []string{fmt.Sprintf(`{"type":"sessions:joined","requestId":"1","cursor":"%d"}`, n)}
		switch {
		case n == changes:
			messages = append(messages, `{"type":"error","code":"CURSOR_AHEAD","field":"cursor","message":"ahead"}`)
		case n%2 == 1:
			messages = append(messages, fmt.Sprintf(`{"type":"sessions:deleted","cursor":"%d","deleted":{"sessionId":"ses_%d"}}`, n+1, n+1))
		default:
			messages = append(messages, fmt.Sprintf(`{"type":"sessions:changed","cursor":"%d","session":{"sessionId":"ses_%d"}}`, n+1, n+1))
		}
		for _, m := range messages {
			if conn.Write(r.Context(), websocket.MessageText, []byte(m)) != nil {
				return
			}
		}
	}))
	defer server.Close()
	c, err := client.New(client.Config{URL: server.URL, GiveUp: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got []string
	for m, err := range c.FollowSessions(context.Background(), "") {
		if err != nil {
			if !client.IsCode(err, client.CodeCursorAhead) {
				t.Errorf("ended with %v", err)
			}
			break
		}
		id := ""
		if m.Session != nil {
			id = m.Session.Value.SessionId
		} else if m.Deleted != nil {
			id = "-" + m.Deleted.Value.SessionId
		}
		got = append(got, id)
	}
	if fmt.Sprint(got) != "[ ses_1 -ses_2 ses_3 -ses_4 ses_5]" {
		t.Errorf("yielded %q", got)
	}
}
