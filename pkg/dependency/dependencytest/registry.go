// Package dependencytest serves packages like the npm and Python registries, for tests of installers. The packages
// are created in memory and served over plain HTTP.
package dependencytest

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// NPMPackage is an npm package that the test registry serves.
type NPMPackage struct {
	Name, Version string
	Files         map[string]string // in addition to package.json, by path
	Bin           map[string]string // programs: file by name
	Scripts       map[string]string // lifecycle scripts, such as postinstall
	Dependencies  map[string]string // range by name
}

// PythonPackage is a Python package that the test registry serves. It has one module with the package's name.
type PythonPackage struct {
	Name, Version string
	Module        string   // source of the module
	Programs      []string // each program calls main() of the module
	Extras        []string
}

// Registry is a registry of packages for tests: npm packages below /npm, Python packages below /pip. It is an
// http.Handler, and is safe for concurrent use.
type Registry struct {
	files map[string]servedFile // by path

	mu    sync.Mutex
	off   bool
	asked []string
}

// New returns a test registry. base is the URL of its npm part, without a trailing slash; the registry's documents
// contain the URL.
func New(base string, npm []NPMPackage, wheels []PythonPackage) (*Registry, error) {
	r := &Registry{files: map[string]servedFile{}}
	for _, p := range npm {
		if err := r.addNPM(base, p); err != nil {
			return nil, fmt.Errorf("package %s: %w", p.Name, err)
		}
	}
	for _, w := range wheels {
		if err := r.addPythonPackage(w); err != nil {
			return nil, fmt.Errorf("wheel %s: %w", w.Name, err)
		}
	}
	return r, nil
}

// ServeHTTP serves the packages. It responds with 503 while the registry is set unavailable.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	r.asked = append(r.asked, req.URL.Path)
	off := r.off
	r.mu.Unlock()
	if off {
		http.Error(w, "the registry is switched off", http.StatusServiceUnavailable)
		return
	}
	f, ok := r.files[req.URL.Path] // not a ServeMux: npm requests @scope%2fname
	if !ok {
		http.NotFound(w, req)
		return
	}
	w.Header().Set("Content-Type", f.kind)
	_, _ = w.Write(f.content) // the client may have disconnected
}

// SetAvailable sets whether the registry serves packages; otherwise it responds with 503.
func (r *Registry) SetAvailable(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = !on
}

// CountRequests returns the number of received requests whose path ends with suffix, or of all requests if suffix is
// "".
func (r *Registry) CountRequests(suffix string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.asked {
		if strings.HasSuffix(p, suffix) {
			n++
		}
	}
	return n
}

type servedFile struct {
	kind    string
	content []byte
}

func (r *Registry) addNPM(base string, p NPMPackage) error {
	manifest := map[string]any{"name": p.Name, "version": p.Version, "bin": p.Bin, "scripts": p.Scripts, "dependencies": p.Dependencies}
	raw, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	files := map[string]string{"package.json": string(raw)}
	maps.Copy(files, p.Files)
	var b bytes.Buffer
	zipped := gzip.NewWriter(&b)
	out := tar.NewWriter(zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := out.WriteHeader(&tar.Header{Name: "package/" + name, Mode: 0o755, Size: int64(len(files[name])), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		if _, err := io.WriteString(out, files[name]); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	if err := zipped.Close(); err != nil {
		return err
	}
	sum := sha512.Sum512(b.Bytes())
	short := p.Name[strings.LastIndexByte(p.Name, '/')+1:]
	tarball := "/" + p.Name + "/-/" + short + "-" + p.Version + ".tgz"
	manifest["dist"] = map[string]any{"tarball": base + tarball, "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}
	manifest["hasInstallScript"] = len(p.Scripts) > 0
	document, err := json.Marshal(map[string]any{"name": p.Name, "dist-tags": map[string]any{"latest": p.Version}, "versions": map[string]any{p.Version: manifest}})
	if err != nil {
		return err
	}
	r.files["/npm/"+p.Name] = servedFile{"application/json", document}
	r.files["/npm"+tarball] = servedFile{"application/octet-stream", b.Bytes()}
	return nil
}

func (r *Registry) addPythonPackage(w PythonPackage) error {
	info := w.Name + "-" + w.Version + ".dist-info/"
	metadata := "Metadata-Version: 2.1\nName: " + w.Name + "\nVersion: " + w.Version + "\n"
	for _, e := range w.Extras {
		metadata += "Provides-Extra: " + e + "\n"
	}
	programs := "[console_scripts]\n"
	for _, p := range w.Programs {
		programs += p + " = " + w.Name + ":main\n"
	}
	files := map[string]string{
		w.Name + ".py": w.Module, info + "METADATA": metadata, info + "entry_points.txt": programs,
		info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
	}
	record := info + "RECORD,,\n"
	for _, name := range slices.Sorted(maps.Keys(files)) {
		record += name + ",,\n"
	}
	files[info+"RECORD"] = record
	var b bytes.Buffer
	out := zip.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		f, err := out.Create(name)
		if err == nil {
			_, err = io.WriteString(f, files[name])
		}
		if err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	sum := sha256.Sum256(b.Bytes())
	file := w.Name + "-" + w.Version + "-py3-none-any.whl"
	r.files["/pip/"+w.Name+"/"] = servedFile{"text/html", []byte(`<!DOCTYPE html><html><body><a href="../../files/` + file + "#sha256=" + hex.EncodeToString(sum[:]) + `">` + file + "</a></body></html>")}
	r.files["/files/"+file] = servedFile{"application/octet-stream", b.Bytes()}
	return nil
}
