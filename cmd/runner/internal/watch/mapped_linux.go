package watch

import (
	"bufio"
	"bytes"
	"os"
	"strconv"
	"strings"
)

// mappedFiles returns the files below the folder dir that the processes pids have mapped into their memory, shared and
// for writing, by their paths relative to dir. The kernel does not report changes through such a mapping until the
// mapping ends. Processes that cannot be examined are left out.
func mappedFiles(dir string, pids []int) (out []string) {
	found := map[string]bool{}
	for _, pid := range pids {
		f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/maps")
		if err != nil {
			continue // it has ended
		}
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 64<<10)
		for lines.Scan() {
			// address perms offset dev inode path
			fields := bytes.Fields(lines.Bytes())
			if len(fields) < 6 || len(fields[1]) < 4 || fields[1][1] != 'w' || fields[1][3] != 's' {
				continue
			}
			start := bytes.IndexByte(lines.Bytes(), '/')
			if start < 0 {
				continue
			}
			path := string(lines.Bytes()[start:])
			if rel, ok := strings.CutPrefix(strings.ReplaceAll(path, `\012`, "\n"), dir+"/"); ok && !found[rel] {
				found[rel] = true
				out = append(out, rel)
			}
		}
		_ = f.Close() // only read
	}
	return out
}
