package modelbody

// FoldKey returns the form in which the keys of interpreted objects are compared.
func FoldKey(key string) string { return string(foldKey(nil, []byte(key))) }

// Unescape returns the text of a JSON string, given the bytes between its quotes.
func Unescape(text string) string {
	var out []byte
	unescape([]byte(text), func(part []byte) bool {
		out = append(out, part...)
		return true
	})
	return string(out)
}
