package system_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/test/bench/system"
)

// TestTakeTurn_ReturnsErrorOfPost has a gateway that refuses messages and sends no event, for which TakeTurn must not wait.
func TestTakeTurn_ReturnsErrorOfPost(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/ws", func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.CloseNow()                                //nolint:errcheck // the client has closed it
		if _, _, err := conn.Read(r.Context()); err != nil { // session:join
			t.Error(err)
		}
		if err := conn.Write(r.Context(), websocket.MessageText, []byte(`{"type":"session:joined"}`)); err != nil {
			t.Error(err)
		}
		<-conn.CloseRead(r.Context()).Done()
	})
	mux.HandleFunc("POST /api/sessions/s/messages", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no slot is free", http.StatusServiceUnavailable)
	})
	web := httptest.NewServer(mux)
	defer web.Close()
	c := system.NewClient(web.URL)
	socket, err := c.JoinSession(t.Context(), "s")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if _, err := c.TakeTurn(t.Context(), socket, "s", "hello", nil); err == nil || !strings.Contains(err.Error(), "no slot is free") {
		t.Errorf("error %v, want the refusal", err)
	}
}
