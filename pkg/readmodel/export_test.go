package readmodel

import "io/fs"

// Migrations returns the files of migrations/.
func Migrations() fs.FS {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err)
	}
	return files
}
