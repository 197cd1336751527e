// answers.json and dashboard.json are put into public/ by scripts/draw_overview.py
export default { esbuild: { jsx: 'automatic' }, base: './', define: { 'process.env': {} }, build: { minify: false } };
