// The behaviour of the page. A page also works without scripts: every choice is a link, every form a GET. Each module
// has one idea, and listens to the events that concern it.

import "./controls.js";
import "./dropping.js";
import "./navigation.js";
import { restoreArrangement } from "./arrangement.js";
import { listPlans, rememberPlan } from "./plans.js";
import { markMistake } from "./mistakes.js";
import { loadSections } from "./sections.js";
import { startWork } from "./stream.js";
import { dressTables } from "./tables.js";

document.documentElement.classList.add("scripted");
rememberPlan();
listPlans();
markMistake();
startWork();
dressTables(document);
restoreArrangement();
loadSections(document);
