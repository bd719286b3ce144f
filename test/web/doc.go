// Package web tests the inspector in a browser, Debian's Chromium, as gateways serve it.
//
// Each scenario is a program for Node in testdata, which uses testdata/browser.mjs; a test starts a stack and calls
// runScenario. The tests use the build in web/dist: run scripts/clients build after a change of the page. With
// SPOOL_SCREENSHOTS=DIR the scenarios write the screenshots that they take into that folder.
package web
