package transcript

import (
	"strconv"
	"unicode/utf16"
)

// maxFolderName is the maximum length in UTF-16 units of the name of a folder of transcripts; Claude Code shortens longer names.
const maxFolderName = 200

// FolderName returns the name of the folder in which Claude Code keeps the transcripts of sessions with the working directory dir. Other agents, such as
// Qwen Code, name their folders alike.
func FolderName(dir string) string {
	units := utf16.Encode([]rune(dir))
	name := make([]byte, len(units))
	var hash int32
	for i, u := range units {
		hash = hash*31 + int32(u)
		switch {
		case u >= 'a' && u <= 'z', u >= 'A' && u <= 'Z', u >= '0' && u <= '9':
			name[i] = byte(u)
		default:
			name[i] = '-'
		}
	}
	if len(name) <= maxFolderName {
		return string(name)
	}
	return string(name[:maxFolderName]) + "-" + strconv.FormatInt(max(int64(hash), -int64(hash)), 36)
}
