package web

import (
	"strconv"
	"strings"
)

// prefersGzip reports whether a client accepts the encoding gzip, and prefers no encoding to none less than gzip
// (RFC 9110, section 12.5.3). values are the values of the header Accept-Encoding.
func prefersGzip(values []string) bool {
	gzip, identity, any := -1.0, -1.0, -1.0 // -1 if the header does not name it
	for element := range strings.SplitSeq(strings.Join(values, ","), ",") {
		name, q := parseCoding(element)
		switch name {
		case "gzip", "x-gzip":
			gzip = max(gzip, q)
		case "identity":
			identity = q
		case "*":
			any = q
		}
	}
	if gzip < 0 {
		gzip = any
	}
	return gzip > 0 && gzip >= identity
}

// parseCoding returns the name and the quality of an element of the header Accept-Encoding, such as "gzip;q=0.5". The
// quality of an element with an invalid one is 0.
func parseCoding(element string) (name string, q float64) {
	name, parameter, ok := strings.Cut(element, ";")
	name = strings.ToLower(strings.TrimSpace(name))
	if !ok {
		return name, 1
	}
	key, value, _ := strings.Cut(strings.TrimSpace(parameter), "=")
	q, err := strconv.ParseFloat(value, 64)
	if err != nil || !strings.EqualFold(key, "q") || !(q >= 0 && q <= 1) {
		return name, 0
	}
	return name, q
}
