// Command gen generates everything that is derived from spool.proto: Go types, the glue of the gRPC and REST servers,
// and openapi.json. It must run in pkg/api. It installs the tools that it needs, in the versions below, under .tools
// at the root of the repository.
package main

import (
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// generatorTools are the code generators that generate installs with `go install`, so that no schema registry is
// needed.
var generatorTools = []string{
	"github.com/bufbuild/buf/cmd/buf@v1.75.0",
	"google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
	"google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
	"github.com/grpc-ecosystem/grpc-gateway/v2/protoc-gen-grpc-gateway@v2.32.0",
	"github.com/grpc-ecosystem/grpc-gateway/v2/protoc-gen-openapiv3@v2.32.0",
}

const (
	toolsDir             = "../../.tools"
	generatedOpenAPIFile = "spool/v1/spool.openapi.json"
	finishedOpenAPIFile  = "spool/v1/openapi.json"
	extraRoutesFile      = "gen/openapi.extra.json"
)

func main() {
	if err := generate(); err != nil {
		log.Fatal(err)
	}
}

func generate() error {
	root, err := filepath.Abs(toolsDir)
	if err != nil {
		return err
	}
	var bins []string
	for _, tool := range generatorTools {
		bin, err := installTool(root, tool)
		if err != nil {
			return err
		}
		bins = append(bins, bin)
	}
	env := append(os.Environ(), "PATH="+strings.Join(append(bins, os.Getenv("PATH")), string(os.PathListSeparator)))
	for _, args := range [][]string{{"lint"}, {"generate"}} {
		cmd := exec.Command(filepath.Join(bins[0], "buf"), args...)
		cmd.Env, cmd.Stdout, cmd.Stderr = env, os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("buf %s: %w", strings.Join(args, " "), err)
		}
	}
	if err := mergeOpenAPI(generatedOpenAPIFile, extraRoutesFile, finishedOpenAPIFile); err != nil {
		return err
	}
	return os.Remove(generatedOpenAPIFile)
}

// installTool installs a generator into a folder named after its version, unless the generator is there already, and
// returns that folder.
func installTool(root, tool string) (string, error) {
	path, version, _ := strings.Cut(tool, "@")
	name := filepath.Base(path)
	dir := filepath.Join(root, name+"-"+version)
	if _, err := os.Stat(filepath.Join(dir, name)); err == nil || !errors.Is(err, os.ErrNotExist) {
		return dir, err
	}
	cmd := exec.Command("go", "install", tool)
	cmd.Env = append(os.Environ(), "GOBIN="+dir, "GOFLAGS=", "GOWORK=off")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("install %s: %w", tool, err)
	}
	return dir, nil
}
