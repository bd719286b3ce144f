package egress_test

import (
	"net/http"
	"testing"
)

func TestNothingIsAllowedByAnEmptyList(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	b := w.box()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://ok.example/", nil)
	status, header, body := b.do(req)
	if status != http.StatusForbidden || header.Get("Spool-Egress") != "NOT_ALLOWED" {
		t.Fatalf("%d %v %s", status, header, body)
	}
	d := b.denied(b.lines(0, 1)[0])
	if d.Code != "NOT_ALLOWED" || d.Host != "ok.example" || d.Port != 80 || d.Method != "GET" || d.Count != 1 || d.Line != 1 || d.Journal == "" {
		t.Errorf("%+v", d)
	}
}
