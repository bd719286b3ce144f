package web

import (
	"regexp"
	"testing"
)

const (
	maxFirstLoad = 180 << 10 // compressed bytes of index.html and all files that it loads
	maxLazyChunk = 100 << 10 // compressed bytes of any other file
	maxEmbedded  = 2 << 20   // bytes of all files as they are embedded
)

// loaded matches the URL of a script, a style sheet, an icon or a preloaded module in index.html. Vite preloads all modules
// that the script imports statically.
var loaded = regexp.MustCompile(`<(?:script|link)\s[^>]*(?:src|href)="\.?/([^"]+)"`)

func TestSizes(t *testing.T) {
	t.Parallel()
	p := newPage(t, "")
	size := func(f *File) int {
		if f.gzip == nil {
			return len(f.content)
		}
		return len(f.gzip())
	}
	first := map[*File]bool{p.index: true}
	for _, match := range loaded.FindAllSubmatch(p.index.content, -1) {
		f := p.files["/"+string(match[1])]
		if f == nil {
			t.Fatalf("index.html loads %s, which is not embedded", match[1])
		}
		first[f] = true
	}
	if len(first) < 2 {
		t.Fatalf("index.html loads no script:\n%s", p.index.content)
	}
	firstLoad, embedded := 0, 0
	for name, f := range p.files {
		embedded += len(f.content)
		switch n := size(f); {
		case first[f]:
			firstLoad += n
		case n > maxLazyChunk:
			t.Errorf("%s has %d compressed bytes, the limit is %d", name, n, maxLazyChunk)
		}
	}
	if firstLoad > maxFirstLoad {
		t.Errorf("the first load has %d compressed bytes, the limit is %d", firstLoad, maxFirstLoad)
	}
	if embedded > maxEmbedded {
		t.Errorf("all files have %d bytes, the limit is %d", embedded, maxEmbedded)
	}
	t.Logf("first load %d bytes compressed, all files %d bytes", firstLoad, embedded)
}
