package web

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func newPage(t *testing.T, prefix string) *Page {
	t.Helper()
	p, err := New(prefix)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// script returns the path of a script in /assets.
func (p *Page) script(t *testing.T) string {
	t.Helper()
	for name := range p.files {
		if strings.HasPrefix(name, assets) && strings.HasSuffix(name, ".js") {
			return name
		}
	}
	t.Fatal("no script in /assets")
	return ""
}

// request serves a request for the file at a path. Each header is a name and a value.
func request(t *testing.T, p *Page, method, path string, header ...[2]string) *http.Response {
	t.Helper()
	r := httptest.NewRequest(method, "/", nil)
	for _, h := range header {
		r.Header.Add(h[0], h[1])
	}
	w := httptest.NewRecorder()
	file := p.Find(path)
	if file == nil {
		t.Fatalf("%s: no file", path)
	}
	file.ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	defer r.Body.Close()
	var from io.Reader = r.Body
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		from = z
	}
	b, err := io.ReadAll(from)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestNew_WritesThePrefixIntoTheBaseElement(t *testing.T) {
	t.Parallel()
	for prefix, want := range map[string]string{"": `<base href="/" />`, "/spool": `<base href="/spool/" />`, "/a/b": `<base href="/a/b/" />`} {
		page := body(t, request(t, newPage(t, prefix), "GET", "/"))
		at, first := strings.Index(page, want), strings.Index(page, "src=")
		if at < 0 || at > first || strings.Count(page, "<base") != 1 {
			t.Errorf("prefix %q: want %s before the first URL of\n%s", prefix, want, page)
		}
	}
}

func TestWithBase_RefusesAPageWithoutOneBaseElement(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"<head></head>", baseElement + baseElement, `<base href="/x/" />`} {
		if _, err := withBase([]byte(page), "/p"); err == nil || !strings.Contains(err.Error(), "want once") {
			t.Errorf("%s: %v", page, err)
		}
	}
}

func TestFind_ReturnsIndexForRoutesOfThePage(t *testing.T) {
	t.Parallel()
	p := newPage(t, "")
	for _, path := range []string{
		"/", "", "/index.html", "/sessions/ses_1", "/sessions/ses_1/files/a.js", "/../../etc/passwd", "//evil.example/", "/<img onerror=alert(1)>", "/assetsx", "/dist/index.html", "/page.go",
		"/a\x00b", "/" + strings.Repeat("a/", 10_000),
	} {
		if f := p.Find(path); f != p.index {
			t.Errorf("%.60q: %v", path, f)
		}
	}
}

func TestFind_ListsAndLeavesNoFolder(t *testing.T) {
	t.Parallel()
	p := newPage(t, "")
	script := p.script(t)
	for _, path := range []string{"/assets", "/assets/", "/assets/.", "/assets/../index.html", "/assets/../../page.go", "/assets//" + script[len(assets):], script + "/", script + "\x00", "/assets/index.html"} {
		if f := p.Find(path); f != nil {
			t.Errorf("%q: found %s", path, f.name)
		}
	}
}

func TestFile_HeadersOfCachesAndTypes(t *testing.T) {
	t.Parallel()
	p := newPage(t, "")
	for path, want := range map[string][2]string{
		"/":           {"text/html; charset=utf-8", "no-cache"},
		"/sessions/x": {"text/html; charset=utf-8", "no-cache"},
		p.script(t):   {"text/javascript; charset=utf-8", "public, max-age=31536000, immutable"},
	} {
		r := request(t, p, "GET", path)
		if got := [2]string{r.Header.Get("Content-Type"), r.Header.Get("Cache-Control")}; got != want || len(body(t, r)) < 100 {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
		for name, want := range map[string]string{
			"Content-Security-Policy": contentSecurityPolicy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
			"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin", "Vary": "Accept-Encoding",
		} {
			if got := r.Header.Get(name); got != want {
				t.Errorf("%s: %s is %q", path, name, got)
			}
		}
	}
}

func TestFile_TypesOfAllEmbeddedFilesAreKnown(t *testing.T) {
	t.Parallel()
	for name := range newPage(t, "").files {
		if contentType(name) == "application/octet-stream" {
			t.Errorf("%s: add its type to contentType", name)
		}
	}
}

func TestFile_AnswersConditionalAndHeadRequests(t *testing.T) {
	t.Parallel()
	p := newPage(t, "")
	for _, path := range []string{"/", p.script(t)} {
		plain, packed := request(t, p, "GET", path), request(t, p, "GET", path, [2]string{"Accept-Encoding", "gzip"})
		if a, b := body(t, plain), body(t, packed); a != b || packed.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("%s: the compressed content differs", path)
		}
		one, two := plain.Header.Get("ETag"), packed.Header.Get("ETag")
		if one == two || one == "" || strings.HasPrefix(one, "W/") {
			t.Errorf("%s: ETags %s and %s of two encodings", path, one, two)
		}
		for _, c := range []struct {
			name   string
			header [2]string
			status int
		}{
			{"the same ETag", [2]string{"If-None-Match", one}, 304},
			{"a list with the ETag", [2]string{"If-None-Match", `"x", W/` + one}, 304},
			{"any", [2]string{"If-None-Match", "*"}, 304},
			{"the ETag of the other encoding", [2]string{"If-None-Match", two}, 200},
			{"a malformed ETag", [2]string{"If-None-Match", strings.Trim(one, `"`)}, 200},
			{"another file", [2]string{"If-Match", `"x"`}, 412},
			{"a time", [2]string{"If-Modified-Since", "Sat, 28 Nov 2099 00:00:00 GMT"}, 200},
		} {
			r := request(t, p, "GET", path, c.header)
			if b := body(t, r); r.StatusCode != c.status || (c.status != 200) != (b == "") {
				t.Errorf("%s: %s: status %d with %d bytes, want %d", path, c.name, r.StatusCode, len(b), c.status)
			}
		}
		head := request(t, p, "HEAD", path)
		if b := body(t, head); b != "" || head.StatusCode != 200 || head.Header.Get("ETag") != one || head.ContentLength != plain.ContentLength {
			t.Errorf("%s: HEAD: status %d, header %v, %d bytes", path, head.StatusCode, head.Header, len(b))
		}
	}
}

func TestPrefersGzip(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values []string
		want   bool
	}{
		{nil, false}, {[]string{""}, false}, {[]string{"gzip"}, true}, {[]string{"GZIP"}, true}, {[]string{"x-gzip"}, true}, {[]string{"br"}, false},
		{[]string{"gzip, deflate, br, zstd"}, true}, {[]string{"deflate", "gzip"}, true}, {[]string{"gzip;q=0"}, false}, {[]string{"gzip; q=0.000"}, false},
		{[]string{"gzip;q=0.001"}, true}, {[]string{"gzip ; Q=1"}, true}, {[]string{"*"}, true}, {[]string{"*;q=0"}, false}, {[]string{"*, gzip;q=0"}, false},
		{[]string{"*;q=0, gzip"}, true}, {[]string{"identity"}, false}, {[]string{"identity;q=1, gzip;q=0.5"}, false}, {[]string{"identity;q=0.5, gzip;q=0.5"}, true},
		{[]string{"gzip;q=2"}, false}, {[]string{"gzip;q=-1"}, false}, {[]string{"gzip;q=NaN"}, false}, {[]string{"gzip;q=Inf"}, false}, {[]string{"gzip;q="}, false}, {[]string{"gzip;x=1"}, false},
		{[]string{"gzipped"}, false}, {[]string{strings.Repeat(",", 30_000)}, false}, {[]string{strings.Repeat("br;q=1,", 4000) + "gzip"}, true},
	} {
		if got := prefersGzip(c.values); got != c.want {
			t.Errorf("%.60q: %v, want %v", c.values, got, c.want)
		}
	}
}
