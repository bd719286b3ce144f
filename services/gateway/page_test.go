package gateway_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/gateway"
)

// script is the element of the inspector's index.html that loads its script.
var script = regexp.MustCompile(`<script type="module" crossorigin src="\./([^"]+)"`)

// wantPage fails the test unless the response is index.html with a base. It returns the path of the script.
func (a answer) wantPage(t *testing.T, base string) string {
	t.Helper()
	found := script.FindSubmatch(a.want(t, 200).body)
	if found == nil || a.header.Get("Content-Type") != "text/html; charset=utf-8" || !bytes.Contains(a.body, []byte(`<base href="`+base+`"`)) {
		t.Fatalf("no page with base %s: %s", base, a)
	}
	return base + string(found[1])
}

// TestPage_IsServedWithoutAKey tests that the inspector is served where the API needs a key, and that the routes of the
// API are as they are without it.
func TestPage_IsServedWithoutAKey(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	file := g.get("/").wantPage(t, "/")
	g.get("/sessions/ses_1?seq=4").wantPage(t, "/")
	if a := g.get(file).want(t, 200); a.header.Get("Content-Type") != "text/javascript; charset=utf-8" || !strings.Contains(a.header.Get("Cache-Control"), "immutable") {
		t.Errorf("%s: %v", file, a.header)
	}
	g.get("/assets/missing.js").wantProblem(t, 404, "NOT_FOUND", "")
	key, _ := w.keyOf(g, "use")
	for _, path := range []string{"/api", "/api/", "/api/missing", "/other/api/sessions", "/healthz/x", "/readyz/", "/metrics/x"} {
		g.get(path).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
		key.get(path, header("Accept", "text/html")).wantProblem(t, 404, "NOT_FOUND", "")
	}
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
		if a := g.do(method, "/", "").wantProblem(t, 405, "METHOD_NOT_ALLOWED", ""); a.header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %v", method, a.header)
		}
	}
	if a := g.do("HEAD", "/", "").want(t, 200); len(a.body) > 0 || a.header.Get("ETag") == "" {
		t.Errorf("HEAD: %s", a)
	}
	g.withKey(w.root).wantMetric(t, `spool_gateway_http_requests_total{method="GET",route="/",status="200"} 3`)
}

func TestPage_IsOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{NoWeb: true})
	for _, path := range []string{"/", "/sessions/ses_1", "/assets/x.js"} {
		if a := g.get(path).wantProblem(t, 404, "NOT_FOUND", ""); !strings.Contains(a.text("detail"), "--no-web") {
			t.Errorf("%s: %s", path, a)
		}
	}
	g.get("/healthz").want(t, 200)
}

// TestPage_BelowAPathPrefix tests the inspector behind a proxy that keeps the prefix, and behind one that removes it.
func TestPage_BelowAPathPrefix(t *testing.T) {
	t.Parallel()
	const prefix = "/tools/spool"
	w := newWorld(t)
	g := w.gateway(gateway.Config{PathPrefix: prefix})
	target, err := url.Parse(g.url)
	must(t, err)
	proxy := httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: client.Transport}
	for name, handler := range map[string]http.Handler{"keeps": &proxy, "removes": http.StripPrefix(prefix, &proxy)} {
		t.Run(name, func(t *testing.T) {
			front := httptest.NewServer(handler)
			defer front.Close()
			p := &served{t: t, url: front.URL}
			for _, path := range []string{"/", "/sessions/ses_1"} {
				file := p.get(prefix+path, header("X-Forwarded-Prefix", "/evil")).wantPage(t, prefix+"/")
				p.get(file).want(t, 200)
			}
			p.get(prefix+"/assets/missing.js").wantProblem(t, 404, "NOT_FOUND", "")
		})
	}
	direct := &served{t: t, url: g.url, http: &http.Client{Transport: client.Transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
	if a := direct.get(prefix+"?seq=1").want(t, 307); a.header.Get("Location") != prefix+"/?seq=1" {
		t.Errorf("the prefix without a slash is redirected to %q", a.header.Get("Location"))
	}
}

// TestAttack_PathsOfThePage tests that a path neither reaches a file outside of the page, nor redirects to another host,
// nor is in an answer that a browser shows as HTML.
func TestAttack_PathsOfThePage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for _, path := range []string{
		"/..%2f..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd", "/..%5c..%5cetc%5cpasswd", "/assets%2f..%2f..%2fpage.go", "//evil.example/%2e%2e", "/%2f%2fevil.example/", "/%5cevil.example/",
		"/<img%20onerror=alert(1)>", "/%3Cscript%3Ealert(1)%3C%2Fscript%3E", "/a%00b", "/assets", "/assets/", "/assets/..", "/assets/%2e%2e%2findex.html", "/assets/<img%20src=x%20onerror=alert(1)>",
		"/a%0d%0aSet-Cookie:%20spool=x", "/" + strings.Repeat("a%2f", 5000),
	} {
		a := g.get(path)
		if strings.HasPrefix(path, "/assets") {
			a.wantProblem(t, 404, "NOT_FOUND", "")
		} else {
			a.wantPage(t, "/")
		}
		if a.header.Get("Location") != "" || a.header.Get("Set-Cookie") != "" || a.header.Get("X-Content-Type-Options") != "nosniff" || bytes.Contains(a.body, []byte("<img")) || bytes.Contains(a.body, []byte("evil")) {
			t.Errorf("%.60s: %v %s", path, a.header, a)
		}
	}
	g.get("/", header("Accept-Encoding", strings.Repeat("gzip;q=0.1,", 4000))).wantProblem(t, 400, "INVALID_REQUEST", "Accept-Encoding")
	if a := g.get("/", header("Accept-Encoding", strings.Repeat("br;q=0.1,", 3000)+"gzip")).want(t, 200); a.header.Get("Content-Encoding") != "gzip" {
		t.Errorf("a long Accept-Encoding: %v", a.header)
	}
}

// TestAttack_PageInAnotherSite tests that other sites can neither frame the page nor send forms to it, and that a name
// that resolves to this machine does not reach a page without keys.
func TestAttack_PageInAnotherSite(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for _, path := range []string{"/", g.get("/").wantPage(t, "/")} {
		a := g.get(path, header("Origin", "https://evil.example"))
		policy := a.want(t, 200).header.Get("Content-Security-Policy")
		for _, directive := range []string{"default-src 'self'", "script-src 'self'", "object-src 'none'", "base-uri 'self'", "frame-ancestors 'none'", "form-action 'none'"} {
			if !strings.Contains(policy+";", directive+";") {
				t.Errorf("%s: the policy %q lacks %s", path, policy, directive)
			}
		}
		if a.header.Get("Access-Control-Allow-Origin") != "" || a.header.Get("Cross-Origin-Resource-Policy") != "same-origin" || a.header.Get("Cross-Origin-Opener-Policy") != "same-origin" {
			t.Errorf("%s: %v", path, a.header)
		}
	}
	form := []option{header("Origin", "https://evil.example"), header("Content-Type", "application/x-www-form-urlencoded")}
	g.do("POST", "/", "a=b", form...).wantProblem(t, 403, "ORIGIN_REFUSED", "Origin")
	g.get("/", func(r *http.Request) { r.Host = "evil.example" }).wantProblem(t, 403, "ORIGIN_REFUSED", "Host")
}

// TestAttack_FilesOfAgentsAreNotDisplayed tests that HTML and SVG that an agent wrote, in files with names that are HTML,
// are downloads in a sandbox.
func TestAttack_FilesOfAgentsAreNotDisplayed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	const content = `<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>`
	names := []string{"<img src=x onerror=alert(1)>.html", "<script>", "a\r\nSet-Cookie: spool=x.xhtml", `a".svg`, "index.html"} // in the order of a snapshot
	var files [][2]string
	for _, name := range names {
		files = append(files, [2]string{name, content})
	}
	w.snapshot("default", id, time.Now(), files...)
	for _, name := range names {
		a := g.get("/api/sessions/"+id+"/files/"+url.PathEscape(name), header("Accept", "text/html")).want(t, 200)
		if h := a.header; !strings.HasPrefix(h.Get("Content-Disposition"), "attachment; ") || h.Get("Content-Security-Policy") != "default-src 'none'; sandbox" ||
			h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Set-Cookie") != "" || strings.ContainsAny(h.Get("Content-Disposition"), "\r\n") {
			t.Errorf("%q: %v", name, h)
		}
	}
}
