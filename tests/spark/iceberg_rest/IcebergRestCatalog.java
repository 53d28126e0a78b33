// The REST catalog of Apache Iceberg's own tests, over SQLite, on a port of the loopback interface that it prints.
// java -cp 'LIB/*' IcebergRestCatalog.java FOLDER
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.jdbc.JdbcCatalog;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.eclipse.jetty.ee10.servlet.ServletContextHandler;
import org.eclipse.jetty.ee10.servlet.ServletHolder;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.server.ServerConnector;

public class IcebergRestCatalog {
    public static void main(String[] words) throws Exception {
        JdbcCatalog catalog = new JdbcCatalog();
        catalog.setConf(new Configuration());
        String folder = words[0];
        catalog.initialize(
            "rest",
            Map.of("uri", "jdbc:sqlite:" + folder + "/rest.db", "jdbc.schema-version", "V1", "warehouse", "file://" + folder + "/warehouse"));
        ServletContextHandler context = new ServletContextHandler();
        context.addServlet(new ServletHolder(new RESTCatalogServlet(new RESTCatalogAdapter(catalog))), "/*");
        Server server = new Server();
        ServerConnector connector = new ServerConnector(server);
        connector.setHost("127.0.0.1");
        server.addConnector(connector);
        server.setHandler(context);
        server.start();
        System.out.println(connector.getLocalPort());
        server.join();
    }
}
