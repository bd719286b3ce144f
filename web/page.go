// Package web embeds the inspector, the page that the gateway serves, as the build in the folder dist.
package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"
)

//go:embed all:dist
var dist embed.FS

// assets is the folder of the files whose names contain a hash of their content.
const assets = "/assets/"

// baseElement is the element of index.html that gets the path of the page. Relative URLs, and the routes of the page,
// are relative to it.
const baseElement = `<base href="/" />`

// Page holds the files of the inspector. It is safe for concurrent use.
type Page struct {
	index *File
	files map[string]*File // by path, such as /assets/index-EoLQj2Tc.js
}

// New returns the page as it is served below a path prefix, such as /spool; "" for none. The prefix must need no escape
// in a URL.
func New(prefix string) (*Page, error) {
	p := &Page{files: map[string]*File{}}
	root, err := fs.Sub(dist, "dist")
	if err != nil {
		return nil, fmt.Errorf("web: %w", err)
	}
	err = fs.WalkDir(root, ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := fs.ReadFile(root, name)
		if name == "index.html" && err == nil {
			content, err = withBase(content, prefix)
		}
		p.files["/"+name] = newFile("/"+name, content)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("web: %w", err)
	}
	if p.index = p.files["/index.html"]; p.index == nil {
		return nil, fmt.Errorf("web: dist has no index.html: run scripts/clients build")
	}
	return p, nil
}

// withBase returns index.html with the path prefix in its base element.
func withBase(index []byte, prefix string) ([]byte, error) {
	if n := bytes.Count(index, []byte(baseElement)); n != 1 {
		return nil, fmt.Errorf("index.html has the element %s %d times, want once", baseElement, n)
	}
	return bytes.Replace(index, []byte(baseElement), []byte(strings.Replace(baseElement, "/", prefix+"/", 1)), 1), nil
}

// Find returns the file for the path of a URL, without the path prefix. Paths that are not files are routes of the page,
// so Find returns index.html for them. It returns nil for a path below /assets that is not a file.
func (p *Page) Find(urlPath string) *File {
	if f := p.files[urlPath]; f != nil {
		return f
	}
	if strings.HasPrefix(urlPath+"/", assets) {
		return nil
	}
	return p.index
}

// File is a file of the page. It serves itself.
type File struct {
	name    string
	content []byte
	hash    string
	gzip    func() []byte // the compressed content; nil if the file is not compressed
}

// newFile returns a File. Its content is compressed on the first use.
func newFile(name string, content []byte) *File {
	sum := sha256.Sum256(content)
	f := &File{name: name, content: content, hash: hex.EncodeToString(sum[:12])}
	switch path.Ext(name) {
	case ".html", ".js", ".css", ".svg", ".json", ".map", ".webmanifest":
		f.gzip = sync.OnceValue(func() []byte { return compress(content) })
	}
	return f
}

// compress returns the content in the format gzip.
func compress(content []byte) []byte {
	var out bytes.Buffer
	w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err == nil {
		_, err = w.Write(content)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil { // a buffer takes every byte
		panic(err)
	}
	return out.Bytes()
}

// contentSecurityPolicy allows scripts and styles of the page itself, requests and WebSockets to its own origin, and no
// page that frames it.
const contentSecurityPolicy = "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; " +
	"connect-src 'self'; object-src 'none'; base-uri 'self'; frame-ancestors 'none'; form-action 'none'"

// ServeHTTP sends the file, compressed if the client prefers that. The method of the request must be GET or HEAD.
func (f *File) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", contentType(f.name))
	h.Set("Content-Security-Policy", contentSecurityPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-cache")
	if strings.HasPrefix(f.name, assets) {
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	content, etag := f.content, f.hash
	if f.gzip != nil {
		h.Add("Vary", "Accept-Encoding")
		if prefersGzip(r.Header.Values("Accept-Encoding")) {
			h.Set("Content-Encoding", "gzip")
			content, etag = f.gzip(), f.hash+"-gzip"
		}
	}
	h.Set("ETag", `"`+etag+`"`)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

// contentType returns the media type for the name of a file.
func contentType(name string) string {
	switch path.Ext(name) {
	case ".html":
		return "text/html; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".json", ".map":
		return "application/json"
	case ".webmanifest":
		return "application/manifest+json"
	case ".svg":
		return "image/svg+xml"
	case ".png":
		return "image/png"
	case ".ico":
		return "image/x-icon"
	case ".woff2":
		return "font/woff2"
	}
	return "application/octet-stream"
}
